"""Findings that the routing, or the paper's own figures, decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from crisp.reproduce.arithmetic import (
    NARROW,
    TOP_K,
    PaperCosts,
    cold_event_ms,
    figure5_costs,
    idle_share,
    overlapped_idle_share,
    sequential_layer_ms,
    table1_costs,
    touched_share,
)
from crisp.reproduce.claims import claims, printed
from crisp.reproduce.evidence import GPU, STRATEGIES, Evidence, strategy_run
from crisp.reproduce.verdict import PartFigures

Answer = tuple[Mapping[str, PartFigures], str]  # by part; where the figures come from
Answers = Callable[[Evidence], Answer]


def single_answer(
    claim: str, how: str, *, ours: float | None = None, elsewhere: float | None = None
) -> Answer:
    """Return the answer to a claim that has a single part."""
    (part,) = claims()[claim].values
    return {part: PartFigures(ours, elsewhere)}, how


def layer_total(evidence: Evidence) -> Answer:
    """Answer Table 1's last row."""
    how = f"the sum of its rows; ours: the profile {GPU}"
    return single_answer(
        "T1.total",
        how,
        ours=sequential_layer_ms(evidence.gpu),
        elsewhere=sequential_layer_ms(table1_costs()),
    )


def expert(claim: str, pick: Callable[[PaperCosts], float]) -> Answers:
    """Answer Figure 5 at full width, beside Table 1."""

    def answer(evidence: Evidence) -> Answer:
        both = TOP_K * pick(table1_costs())
        how = f"Table 1 has {TOP_K} of them in {both:g} ms; ours: the profile {GPU}"
        return single_answer(claim, how, ours=pick(evidence.gpu), elsewhere=pick(table1_costs()))

    return answer


def half(claim: str) -> Answers:
    """Answer Figure 5 at half width, beside its own full width."""

    def answer(evidence: Evidence) -> Answer:
        full = printed(claim.replace("half", "full"))
        return single_answer(claim, "half of Figure 5's full width", elsewhere=NARROW * full)

    return answer


def idle(evidence: Evidence) -> Answer:
    """Answer Section 2.3: load, then compute."""
    return single_answer(
        "S2.3.naive", "Figure 5's times", elsewhere=100 * idle_share(figure5_costs())
    )


def idle_overlapped(evidence: Evidence) -> Answer:
    """Answer Section 2.3: as much overlap as there can be."""
    least = min(overlapped_idle_share(costs) for costs in (table1_costs(), figure5_costs()))
    how = "the least with everything else hidden and nothing cached, by Table 1 or Figure 5"
    return single_answer("S2.3.ideal", how, elsewhere=100 * least)


def skew(claim: str, fact: str) -> Answers:
    """Answer Figure 3; fact: of `crisp.trace.describe.LayerFacts`."""

    def answer(evidence: Evidence) -> Answer:
        share = evidence.described.mean(fact)
        assert share is not None
        return single_answer(claim, f"ours: {evidence.routing_source}", ours=100 * share)

    return answer


def tiers(claim: str, other: str) -> Answers:
    """Answer the combinations of each tier; other: the claim that contradicts."""

    def answer(evidence: Evidence) -> Answer:
        parts = {
            part: PartFigures(ours, printed(other, part))
            for part, ours in zip(("Hot", "Warm", "Cold"), tier_shares(evidence), strict=True)
        }
        if "Hot's activations" in claims()[claim].values:
            taken = [layer.tier_activations or (0.0,) * 3 for layer in evidence.described.layers]
            parts["Hot's activations"] = PartFigures(
                100 * sum(hot for hot, _, _ in taken) / len(taken)
            )
        return parts, f"{claims()[other].where} has others; ours: {evidence.routing_source}"

    return answer


def tier_shares(evidence: Evidence) -> list[float]:
    """Return the percent of the combinations that are Hot, Warm and Cold, mean over layers."""
    layers = [layer.tier_combinations or (0.0,) * 3 for layer in evidence.described.layers]
    return [100 * sum(column) / len(layers) for column in zip(*layers, strict=True)]


def access(evidence: Evidence) -> Answer:
    """Answer Eq. 4, with the paper's shares and with the trace's."""
    saved = evidence.described.mean("saving")
    assert saved is not None
    how = f"Eq. 4 itself; ours: {evidence.routing_source}"
    return single_answer(
        "S3.3.access", how, ours=100 * saved, elsewhere=100 * (1 - touched_share())
    )


def accuracy(evidence: Evidence) -> Answer:
    """Answer Figure 9: the accuracy cannot depend on a budget that the widths do not look at."""
    kept, full = printed("F8.kept", "CRISP"), printed("F9.acc40", "full")
    how = f"CRISP's widths do not look at the budget: as in Figure 8, {kept:g} % of {full:g}"
    return {"CRISP": PartFigures(elsewhere=kept * full / 100)}, how


def neurons(evidence: Evidence) -> Answer:
    """Answer Figure 12, whose last order is what Figure 13 and Table 4 call 50 % width."""
    how = "importance order at 50 % is Figure 13's and Table 4's 50 % width"
    return {"importance": PartFigures(elsewhere=printed("F13.ppl", "all 50 %"))}, how


def policies(evidence: Evidence) -> Answer:
    """Answer Figure 13, whose 50 % width is what Figure 12 calls importance order."""
    how = "50 % width in importance order is Figure 12's last"
    return {"all 50 %": PartFigures(elsewhere=printed("F12.mixtral", "importance"))}, how


def volume(evidence: Evidence) -> Answer:
    """Answer Figure 13's bytes."""
    elsewhere = (1.0, NARROW, 1 / TOP_K, touched_share())
    return {
        part: PartFigures(loaded_percent(evidence, width, "none"), 100 * share)
        for (part, width), share in zip(STRATEGIES.items(), elsewhere, strict=True)
    }, "one expert of two is half; tiered is Eq. 4; ours: no cache"


def loaded_percent(evidence: Evidence, width: str, cache: str) -> float:
    """Return the bytes a token loads, in percent of those at full width with the same cache."""
    loaded, full = (
        evidence.metric(strategy_run(kind, cache), "bytes_per_token")
        for kind in (width, STRATEGIES["all full"])
    )
    return 100 * loaded / full


def warm_volume(evidence: Evidence) -> Answer:
    """Answer Table 4's bytes."""
    shares = (1.0, 0.75, NARROW, (1 + NARROW) / TOP_K)
    parts = claims()["T4.io"].values
    return {
        part: PartFigures(elsewhere=100 * share) for part, share in zip(parts, shares, strict=True)
    }, "the mean of the two widths"


def cold(evidence: Evidence) -> Answer:
    """Answer Figure 15: how the time of an event falls with its auxiliary's width."""
    widths = {"full": 1.0, "half": NARROW, "none": 0.0}
    scale = printed("F15.cold", "full") / cold_event_ms(table1_costs(), 1)
    return {
        part: PartFigures(elsewhere=scale * cold_event_ms(table1_costs(), width))
        for part, width in widths.items()
    }, "an event by Table 1, overlapped, nothing cached; scaled to the first"
