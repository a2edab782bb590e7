"""The tables of each section, from the figures of one experiment on one model."""

from __future__ import annotations

from benchmarks.quality.page import paper_rows
from benchmarks.quality.page.tables import Figure, markdown, number, percent, percents, plus_minus
from benchmarks.quality.page.tables import policies as table


def policies(figures: Figure) -> str:
    """Format Figure 7."""
    return table(figures["rows"], paper_rows.ROWS["policies"])


def orders(figures: Figure) -> str:
    """Format Figure 12, at both widths."""
    half = table(figures["uniform(.5)"]["rows"], paper_rows.ROWS["orders"])
    rest = table(figures["uniform(.75)"]["rows"])
    return f"At 50 % of the neurons:\n\n{half}\n\nAt 75 %:\n\n{rest}"


def strategies(figures: Figure) -> str:
    """Format Figure 13 and Table 4, then controls."""
    first = len(figures["paper_rows"])
    ours = table(figures["rows"][:first], paper_rows.ROWS["strategies"])
    return f"{ours}\n\nControls:\n\n{table(figures['rows'][first:])}"


def masking(figures: Figure) -> str:
    """Format Figure 4, combination by combination."""
    rows = [
        [
            f"layer {pair['layer']}: {pair['dominant']} with {pair['auxiliary']}",
            number(pair["dominant_cost"], 3),
            number(pair["auxiliary_cost"], 3),
        ]
        for pair in figures["pairs"]
    ]
    mean = [
        "**mean**",
        number(figures["dominant_cost"], 3),
        number(figures["auxiliary_cost"], 3),
    ]
    facts = (
        f"{figures['tokens']:,} tokens, perplexity of all of them {number(figures['perplexity'])}. "
        f"The dominant expert's mean cost is {number(figures['ratio'])} times the auxiliary's "
        "(paper: 3.7); of the two the one that costs more on this text, "
        f"{_larger(figures):.2f} times the other's. In {percent(figures['same']['value'])} of the "
        "combinations the expert that calibration text says is dominant costs more on held-out "
        "text, too."
    )
    head = ["dominant with auxiliary", "dominant masked", "auxiliary masked"]
    text = markdown(head, [*rows, mean, ["paper", "2.64", "0.71"]])
    return f"{facts}\n\n{text}"


def _larger(figures: Figure) -> float:
    """Return how many times the larger cost of a combination is the smaller, in the mean."""
    costs = [
        sorted((pair["dominant_cost"]["value"], pair["auxiliary_cost"]["value"]))
        for pair in figures["pairs"]
    ]
    return float(sum(large for _, large in costs) / sum(small for small, _ in costs))


def classes(figures: Figure) -> str:
    """Format Figure 1."""
    rows = [
        [
            row["class"],
            percent(row["share"]),
            percents(row["lost"]),
            percents(row["increase"], sign=True),
            percents(row["alone"]["increase"], sign=True),
            paper_rows.ROWS["classes"][row["class"]],
        ]
        for row in figures["rows"]
    ]
    head = [
        "combinations of a layer", "events", "predictions lost", "perplexity of these tokens",
        "only this class at half width: perplexity of all tokens", "paper: accuracy lost",
    ]  # fmt: skip
    return markdown(head, rows)


def expert(figures: Figure) -> str:
    """Format Figure 2."""
    rows = [
        [
            f"with expert {pair['partner']}",
            "dominant" if pair["dominant"] else "auxiliary",
            f"{pair['tokens']:,}",
            percents(pair["increase"], sign=True),
        ]
        for pair in figures["pairs"]
    ]
    head = ["combination", "role", "tokens", "perplexity of these tokens"]
    shown = "" if len(rows) == figures["combinations"] else f", the {len(rows)} most frequent"
    text = (
        f"Expert {figures['expert']} of layer {figures['layer']} dropped from its layer; its "
        f"combinations{shown}. Over all of them, the perplexity of a token grows by "
        f"{percents(figures['where_dominant'])} where the expert is dominant and by "
        f"{percents(figures['where_auxiliary'])} where it is auxiliary."
    )
    return f"{text}\n\n{markdown(head, rows, 2)}"


def tiers(figures: Figure) -> str:
    """Format Figure 15: both of its panels."""
    head = ["tier", "events", "predictions kept", "only this tier's rule: kept",
            "only this tier's rule: perplexity of all tokens", "paper: kept, events"]  # fmt: skip
    rows = [
        [
            row["tier"],
            percent(row["share"]),
            plus_minus(row["retention"], percent),
            plus_minus(row["alone"], percent),
            percents(row["alone_increase"], sign=True),
            paper_rows.ROWS["tiers"][row["tier"]],
        ]
        for row in figures["rows"]
    ]
    cold = [
        [
            row["auxiliary"],
            plus_minus(row["kept"], percent),
            percent(row["share"]),
            percents(row["increase"], sign=True),
            paper_rows.ROWS["cold"][row["auxiliary"]],
        ]
        for row in figures["cold"]
    ]
    cold_head = ["auxiliary of Cold combinations", "predictions kept of Cold events",
                 "bytes of all events", "perplexity of all tokens",
                 "paper: kept, I/O of Cold events"]  # fmt: skip
    return f"{markdown(head, rows)}\n\n{markdown(cold_head, cold)}"


def memory(figures: Figure) -> str:
    """Format Figure 9, setting by setting."""
    kinds = list(figures["groups"][0]["rows"][0]["by_kind"])
    rows = []
    for group in figures["groups"]:
        for place, setting in enumerate(group["rows"]):
            rows.append([
                f"**{setting['label']}**" if place == 0 else _kept(setting),
                percent(setting["share"]),
                percent(setting["stored"]) if "stored" in setting else "100.0 %",
                *(plus_minus(setting["by_kind"][kind]["perplexity"]) for kind in kinds),
                percents(setting["increase"], sign=True),
                plus_minus(setting["retention"], percent),
            ])  # fmt: skip
    for row in rows:
        if row[0].startswith("uniform"):
            row[2] = row[1]
    head = ["", "bytes touched", "bytes stored", *kinds, "increase", "predictions kept"]
    return markdown(head, rows)


def _kept(row: Figure) -> str:
    return str(row["label"]) + (f" ({row['kept']} kept)" if "kept" in row else "")


def shift(figures: Figure) -> str:
    """Format Figure 16, with measured roles and without."""
    same = ", ".join(
        f"{pair['a']} on {pair['b']} {percent(pair['events'])}" for pair in figures["same_tier"]
    )
    parts = [_shifts(figures["targets"])]
    if figures["by_weight"]:
        parts = ["Measured roles:", *parts, "Each token's heavier expert as the dominant one:"]
        parts.append(_shifts(figures["by_weight"]))
    return "\n\n".join([*parts, f"Events that keep their tier: {same}."])


def _shifts(targets: list[Figure]) -> str:
    rows = []
    for target in targets:
        name = target["target"]
        rows.append([name, name, *_cells(target["matched"]), "", ""])
        rows += [
            [source, name, *_cells(source_row["transferred"]), *_cells(source_row["refreshed"])[1:]]
            for source, source_row in target["sources"].items()
        ]
        rows.append(["tiers at random", name, *_cells(target["random"]), "", ""])
    head = ["metadata of", "used on", "bytes", "increase", "predictions kept",
            "refreshed: increase", "refreshed: kept"]  # fmt: skip
    return markdown(head, rows, 2)


def _cells(row: Figure) -> list[str]:
    return [
        percent(row["share"]),
        percents(row["increase"], sign=True),
        plus_minus(row["retention"], percent),
    ]


def settling(figures: Figure) -> str:
    """Format how figures settle with more calibration tokens."""
    rows = [
        [
            f"{row['tokens']:,}",
            percent(row["same_tier"]),
            percent(row["same_role"]),
            str(row["unreached"]),
            percents(row["increase"], sign=True) if "increase" in row else "",
        ]
        for row in figures["rows"]
    ]
    head = ["calibration tokens", "events with the last row's tier", "with its dominant expert",
            "experts never reached", "increase, all prepared with these tokens"]  # fmt: skip
    return markdown(head, rows)


def roles(figures: Figure) -> str:
    """Format what each method of telling roles costs, then how far they agree."""
    rows = [
        [
            name,
            f"{method['passes']:,}",
            f"{method['tokens']:,}",
            f"{method['seconds']:.0f}" if method["seconds"] else "",
            percent(method["heavier"]),
        ]
        for name, method in figures["cost"].items()
    ]
    head = ["way", "masked passes", "tokens of a pass", "seconds", "heavier expert is dominant"]
    pairs = [
        [
            f"{method['a']} and {method['b']}",
            f"{method['rank']:.2f}",
            percent(method["same"]),
            str(method["pairs"]),
        ]
        for method in figures["agreement"]
    ]
    head_pairs = ["", "rank correlation", "same dominant expert", "combinations"]
    return f"{markdown(head, rows)}\n\n{markdown(head_pairs, pairs)}"
