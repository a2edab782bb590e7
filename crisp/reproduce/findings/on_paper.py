"""Claims that routing, or the paper's own figures, decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from crisp.reproduce.arithmetic import (
    NARROW,
    TOP_K,
    Costs,
    bubble,
    bubble_overlapped,
    cold_time,
    figure5,
    table1,
    total,
    touched,
)
from crisp.reproduce.claims import claims, printed
from crisp.reproduce.evidence import GPU, STRATEGIES, Evidence, strategy
from crisp.reproduce.verdict import Found

Answer = tuple[Mapping[str, Found], str]  # by part; where the figures come from
Answers = Callable[[Evidence], Answer]


def one(
    claim: str, how: str, *, ours: float | None = None, elsewhere: float | None = None
) -> Answer:
    """The answer to a claim that has a single part."""
    (part,) = claims()[claim].values
    return {part: Found(ours, elsewhere)}, how


def layer_total(evidence: Evidence) -> Answer:
    """Table 1's last row."""
    how = f"the sum of its rows; ours: the profile {GPU}"
    return one("T1.total", how, ours=total(evidence.gpu), elsewhere=total(table1()))


def expert(claim: str, pick: Callable[[Costs], float]) -> Answers:
    """Figure 5 at full width, beside Table 1."""

    def answer(evidence: Evidence) -> Answer:
        how = (
            f"Table 1 has {TOP_K} of them in {TOP_K * pick(table1()):g} ms; ours: the profile {GPU}"
        )
        return one(claim, how, ours=pick(evidence.gpu), elsewhere=pick(table1()))

    return answer


def half(claim: str) -> Answers:
    """Figure 5 at half width, beside its own full width."""

    def answer(evidence: Evidence) -> Answer:
        full = printed(claim.replace("half", "full"))
        return one(claim, "half of Figure 5's full width", elsewhere=NARROW * full)

    return answer


def idle(evidence: Evidence) -> Answer:
    """Section 2.3: load, then compute."""
    return one("S2.3.naive", "Figure 5's times", elsewhere=100 * bubble(figure5()))


def idle_overlapped(evidence: Evidence) -> Answer:
    """Section 2.3: as much overlap as there can be."""
    least = min(bubble_overlapped(costs) for costs in (table1(), figure5()))
    how = "the least with everything else hidden and nothing cached, by Table 1 or Figure 5"
    return one("S2.3.ideal", how, elsewhere=100 * least)


def skew(claim: str, fact: str) -> Answers:
    """Figure 3; fact: of `crisp.trace.describe.LayerFacts`."""

    def answer(evidence: Evidence) -> Answer:
        found = evidence.described.mean(fact)
        assert found is not None
        return one(claim, f"ours: {evidence.made}", ours=100 * found)

    return answer


def tiers(claim: str, other: str) -> Answers:
    """How many combinations are in each tier; other: the claim that says otherwise."""

    def answer(evidence: Evidence) -> Answer:
        parts = {
            part: Found(ours, printed(other, part))
            for part, ours in zip(("Hot", "Warm", "Cold"), tier_shares(evidence), strict=True)
        }
        if "Hot's activations" in claims()[claim].values:
            taken = [layer.tier_activations or (0.0,) for layer in evidence.described.layers]
            parts["Hot's activations"] = Found(100 * sum(own[0] for own in taken) / len(taken))
        return parts, f"{claims()[other].where} has others; ours: {evidence.made}"

    return answer


def tier_shares(evidence: Evidence) -> list[float]:
    """Percent of the combinations that are Hot, Warm and Cold, mean over layers."""
    known = [layer.tier_combinations or (0.0,) * 3 for layer in evidence.described.layers]
    return [100 * sum(column) / len(known) for column in zip(*known, strict=True)]


def access(evidence: Evidence) -> Answer:
    """Eq. 4, with the paper's shares and with the trace's."""
    saved = evidence.described.mean("saving")
    assert saved is not None
    how = f"Eq. 4 itself; ours: {evidence.made}"
    return one("S3.3.access", how, ours=100 * saved, elsewhere=100 * (1 - touched()))


def accuracy(evidence: Evidence) -> Answer:
    """Figure 9: the policy's accuracy cannot depend on a budget its widths do not look at."""
    kept, full = printed("F8.kept", "CRISP"), printed("F9.acc40", "full")
    how = f"CRISP's widths do not look at the budget: as in Figure 8, {kept:g} % of {full:g}"
    return {"CRISP": Found(elsewhere=kept * full / 100)}, how


def neurons(evidence: Evidence) -> Answer:
    """Figure 12's last order is what Figure 13 and Table 4 call 50 % width."""
    how = "importance order at 50 % is Figure 13's and Table 4's 50 % width"
    return {"importance": Found(elsewhere=printed("F13.ppl", "all 50 %"))}, how


def policies(evidence: Evidence) -> Answer:
    """Figure 13's 50 % width is what Figure 12 calls importance order."""
    how = "50 % width in importance order is Figure 12's last"
    return {"all 50 %": Found(elsewhere=printed("F12.mixtral", "importance"))}, how


def volume(evidence: Evidence) -> Answer:
    """Figure 13's bytes."""
    elsewhere = (1.0, NARROW, 1 / TOP_K, touched())
    return {
        part: Found(volume_found(evidence, width, "none"), 100 * share)
        for (part, width), share in zip(STRATEGIES.items(), elsewhere, strict=True)
    }, "one expert of two is half; tiered is Eq. 4; ours: no cache"


def volume_found(evidence: Evidence, width: str, cache: str) -> float:
    """Bytes that a token loads, in percent of those at full width with the same cache."""
    own, full = (
        evidence.metric(strategy(kind, cache), "bytes_per_token")
        for kind in (width, STRATEGIES["all full"])
    )
    return 100 * own / full


def warm_volume(evidence: Evidence) -> Answer:
    """Table 4's bytes."""
    shares = (1.0, 0.75, NARROW, (1 + NARROW) / TOP_K)
    parts = claims()["T4.io"].values
    return {
        part: Found(elsewhere=100 * share) for part, share in zip(parts, shares, strict=True)
    }, "the mean of the two widths"


def cold(evidence: Evidence) -> Answer:
    """Figure 15: how the time of an event falls with its auxiliary's width."""
    widths = {"full": 1.0, "half": NARROW, "none": 0.0}
    scale = printed("F15.cold", "full") / cold_time(table1(), 1)
    return {
        part: Found(elsewhere=scale * cold_time(table1(), width)) for part, width in widths.items()
    }, "an event by Table 1, overlapped, nothing cached; scaled to the first"
