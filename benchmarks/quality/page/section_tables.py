"""The tables of each section, from the figures of one experiment on one model."""

from __future__ import annotations

from benchmarks.quality.page import paper_rows
from benchmarks.quality.page.tables import Figure, markdown, number, percent, percents, plus_minus
from benchmarks.quality.page.tables import policies as table


def policies(found: Figure) -> str:
    """Format Figure 7."""
    return table(found["rows"], paper_rows.ROWS["policies"])


def orders(found: Figure) -> str:
    """Format Figure 12, at both widths."""
    half = table(found["uniform(.5)"]["rows"], paper_rows.ROWS["orders"])
    rest = table(found["uniform(.75)"]["rows"])
    return f"At 50 % of the neurons:\n\n{half}\n\nAt 75 %:\n\n{rest}"


def strategies(found: Figure) -> str:
    """Format Figure 13 and Table 4, then controls."""
    first = len(found["paper_rows"])
    ours = table(found["rows"][:first], paper_rows.ROWS["strategies"])
    return f"{ours}\n\nControls:\n\n{table(found['rows'][first:])}"


def masking(found: Figure) -> str:
    """Format Figure 4, combination by combination."""
    rows = [
        [
            f"layer {own['layer']}: {own['dominant']} with {own['auxiliary']}",
            number(own["dominant_cost"], 3),
            number(own["auxiliary_cost"], 3),
        ]
        for own in found["pairs"]
    ]
    mean = [
        "**mean**",
        number(found["dominant_cost"], 3),
        number(found["auxiliary_cost"], 3),
    ]
    facts = (
        f"{found['tokens']:,} tokens, perplexity of all of them {number(found['perplexity'])}. The "
        f"dominant expert's mean cost is {number(found['ratio'])} times the auxiliary's (paper: "
        f"3.7); of the two the one that costs more on this text, {_larger(found):.2f} times the "
        f"other's. In {percent(found['same']['value'])} of the combinations the expert that "
        "calibration text says is dominant costs more on held-out text, too."
    )
    head = ["dominant with auxiliary", "dominant masked", "auxiliary masked"]
    made = markdown(head, [*rows, mean, ["paper", "2.64", "0.71"]])
    return f"{facts}\n\n{made}"


def _larger(found: Figure) -> float:
    """Return how many times the larger cost of a combination is the smaller, in the mean."""
    costs = [
        sorted((own["dominant_cost"]["value"], own["auxiliary_cost"]["value"]))
        for own in found["pairs"]
    ]
    return float(sum(large for _, large in costs) / sum(small for small, _ in costs))


def classes(found: Figure) -> str:
    """Format Figure 1."""
    rows = [
        [
            own["class"],
            percent(own["share"]),
            percents(own["lost"]),
            percents(own["increase"], sign=True),
            percents(own["alone"]["increase"], sign=True),
            paper_rows.ROWS["classes"][own["class"]],
        ]
        for own in found["rows"]
    ]
    head = [
        "combinations of a layer", "events", "predictions lost", "perplexity of these tokens",
        "only this class at half width: perplexity of all tokens", "paper: accuracy lost",
    ]  # fmt: skip
    return markdown(head, rows)


def expert(found: Figure) -> str:
    """Format Figure 2."""
    rows = [
        [
            f"with expert {own['partner']}",
            "dominant" if own["dominant"] else "auxiliary",
            f"{own['tokens']:,}",
            percents(own["increase"], sign=True),
        ]
        for own in found["pairs"]
    ]
    head = ["combination", "role", "tokens", "perplexity of these tokens"]
    shown = "" if len(rows) == found["combinations"] else f", the {len(rows)} most frequent"
    text = (
        f"Expert {found['expert']} of layer {found['layer']} dropped from its layer; its "
        f"combinations{shown}. Over all of them, the perplexity of a token grows by "
        f"{percents(found['where_dominant'])} where the expert is dominant and by "
        f"{percents(found['where_auxiliary'])} where it is auxiliary."
    )
    return f"{text}\n\n{markdown(head, rows, 2)}"


def tiers(found: Figure) -> str:
    """Format Figure 15: both of its panels."""
    head = ["tier", "events", "predictions kept", "only this tier's rule: kept",
            "only this tier's rule: perplexity of all tokens", "paper: kept, events"]  # fmt: skip
    rows = [
        [
            own["tier"],
            percent(own["share"]),
            plus_minus(own["retention"], percent),
            plus_minus(own["alone"], percent),
            percents(own["alone_increase"], sign=True),
            paper_rows.ROWS["tiers"][own["tier"]],
        ]
        for own in found["rows"]
    ]
    cold = [
        [
            own["auxiliary"],
            plus_minus(own["kept"], percent),
            percent(own["share"]),
            percents(own["increase"], sign=True),
            paper_rows.ROWS["cold"][own["auxiliary"]],
        ]
        for own in found["cold"]
    ]
    cold_head = ["auxiliary of Cold combinations", "predictions kept of Cold events",
                 "bytes of all events", "perplexity of all tokens",
                 "paper: kept, I/O of Cold events"]  # fmt: skip
    return f"{markdown(head, rows)}\n\n{markdown(cold_head, cold)}"


def memory(found: Figure) -> str:
    """Format Figure 9, setting by setting."""
    kinds = list(found["groups"][0]["rows"][0]["by_kind"])
    rows = []
    for group in found["groups"]:
        for place, own in enumerate(group["rows"]):
            rows.append([
                f"**{own['label']}**" if place == 0 else _kept(own),
                percent(own["share"]),
                percent(own["stored"]) if "stored" in own else "100.0 %",
                *(plus_minus(own["by_kind"][kind]["perplexity"]) for kind in kinds),
                percents(own["increase"], sign=True),
                plus_minus(own["retention"], percent),
            ])  # fmt: skip
    for row in rows:
        if row[0].startswith("uniform"):
            row[2] = row[1]
    head = ["", "bytes touched", "bytes stored", *kinds, "increase", "predictions kept"]
    return markdown(head, rows)


def _kept(own: Figure) -> str:
    return str(own["label"]) + (f" ({own['kept']} kept)" if "kept" in own else "")


def shift(found: Figure) -> str:
    """Format Figure 16, with measured roles and without."""
    same = ", ".join(
        f"{own['a']} on {own['b']} {percent(own['events'])}" for own in found["same_tier"]
    )
    parts = [_shifts(found["targets"])]
    if found["by_weight"]:
        parts = ["Measured roles:", *parts, "Each token's heavier expert as the dominant one:"]
        parts.append(_shifts(found["by_weight"]))
    return "\n\n".join([*parts, f"Events that keep their tier: {same}."])


def _shifts(targets: list[Figure]) -> str:
    rows = []
    for target in targets:
        name = target["target"]
        rows.append([name, name, *_cells(target["matched"]), "", ""])
        rows += [
            [source, name, *_cells(own["transferred"]), *_cells(own["refreshed"])[1:]]
            for source, own in target["sources"].items()
        ]
        rows.append(["tiers at random", name, *_cells(target["random"]), "", ""])
    head = ["metadata of", "used on", "bytes", "increase", "predictions kept",
            "refreshed: increase", "refreshed: kept"]  # fmt: skip
    return markdown(head, rows, 2)


def _cells(own: Figure) -> list[str]:
    return [
        percent(own["share"]),
        percents(own["increase"], sign=True),
        plus_minus(own["retention"], percent),
    ]


def settling(found: Figure) -> str:
    """Format how figures settle with more calibration tokens."""
    rows = [
        [
            f"{own['tokens']:,}",
            percent(own["same_tier"]),
            percent(own["same_role"]),
            str(own["unreached"]),
            percents(own["increase"], sign=True) if "increase" in own else "",
        ]
        for own in found["rows"]
    ]
    head = ["calibration tokens", "events with the last row's tier", "with its dominant expert",
            "experts never reached", "increase, all prepared with these tokens"]  # fmt: skip
    return markdown(head, rows)


def roles(found: Figure) -> str:
    """Format what each method of telling roles costs, then how far they agree."""
    rows = [
        [
            name,
            f"{own['passes']:,}",
            f"{own['tokens']:,}",
            f"{own['seconds']:.0f}" if own["seconds"] else "",
            percent(own["heavier"]),
        ]
        for name, own in found["cost"].items()
    ]
    head = ["way", "masked passes", "tokens of a pass", "seconds", "heavier expert is dominant"]
    pairs = [
        [
            f"{own['a']} and {own['b']}",
            f"{own['rank']:.2f}",
            percent(own["same"]),
            str(own["pairs"]),
        ]
        for own in found["agreement"]
    ]
    head_pairs = ["", "rank correlation", "same dominant expert", "combinations"]
    return f"{markdown(head, rows)}\n\n{markdown(head_pairs, pairs)}"
