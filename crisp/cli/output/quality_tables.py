"""Tables of quality for people: what each policy costs, in text that stays readable in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from crisp.cli.output.columns import DASH, align_columns, format_numbers
from crisp.cli.output.words import describe_rounding
from crisp.model.spec import ModelSpec
from crisp.quality import Estimate, Quality
from crisp.statistics import LEVEL, RESAMPLES
from crisp.text_windows import TokenWindows
from crisp.units import format_bytes

_WIDTH = 100


@dataclass(frozen=True, eq=False)
class Row:
    """A measurement, and how its width was spelled."""

    width: str
    quality: Quality

    @property
    def head(self) -> list[str]:
        """The first two cells."""
        return [self.quality.settings["policy"]["name"], self.width]


def format_title(
    quality: Quality, spec: ModelSpec, windows: TokenWindows, counted: str | None
) -> list[str]:
    """Return the conditions, a line each: they belong to every number below them.

    counted: where counts of combinations came from.
    """
    settings = quality.settings
    stride = f"windows of {windows.window} tokens, stride {windows.stride}: "
    if windows.stride < windows.window:
        stride += f"each scores its last {windows.stride}, a text's first all but its first token"
    else:
        stride += "no overlap, so that every token is fed once"
    lines = {
        "model": f"{spec.name}, {spec.n_layers} layers, {spec.n_experts} experts, "
        f"top-{spec.top_k}; {settings['run']}",
        "text": f"{', '.join(windows.names)}: {windows.n_scored:,} tokens scored",
        "windows": f"{len(windows.tokens):,} {stride}",
        "experts": f"{spec.n_blocks} blocks of {spec.block} neurons, "
        f"{format_bytes(spec.mean_block_bytes)} each as stored in {float(spec.bits):g} bits",
        "profile": counted,
        "budget": settings["budget"] and _budget(settings["budget"], spec),
        "run": f"batch {settings['batch']}, seed {settings['seed']}; ranges: {LEVEL} % bootstrap "
        f"over windows, {RESAMPLES:,} resamples",
    }
    return [
        line
        for key, text in lines.items()
        if text
        for line in wrap(text, _WIDTH, initial_indent=f"{key:<10}", subsequent_indent=" " * 10)
    ]


def _budget(held: dict[str, Any], spec: ModelSpec) -> str:
    experts = held["blocks"] / spec.n_blocks
    return (
        f"{held['asked']}: {experts:,.4g} of {spec.n_routed:,} experts, "
        f"{100 * held['share']:.1f} %; one window after the other"
    )


def format_tables(rows: Sequence[Row]) -> list[str]:
    """Return tables of losses and, if there is more to say, by text, by tier, of cache, tasks."""
    sections = [_losses(rows)]
    if len(rows[0].quality.by_text) > 1:
        sections.append(_by_text(rows))
    if any(row.quality.by_tier for row in rows):
        sections.append(_by_tier(rows))
    if any(row.quality.settings["budget"] for row in rows):
        sections.append(_cache(rows))
    if any(row.quality.tasks for row in rows):
        sections.append(_tasks(rows))
    return "\n\n".join("\n".join(lines) for lines in sections).split("\n")


def _losses(rows: Sequence[Row]) -> list[str]:
    whole = [row.quality.whole for row in rows]
    costs = [row.quality.costs for row in rows]
    touched = [cost["bytes_touched_per_token"] for cost in costs]
    of = touched[0] or 1
    columns = [
        ("ppl", format_numbers([figures.perplexity.value for figures in whole], 2)),
        ("range", [_range(figures.perplexity, 2) for figures in whole]),
        ("loss %", _values([figures.ratio for figures in whole], 1, 100, -100)),
        ("range", [_range(figures.ratio, 1, 100, -100) for figures in whole]),
        ("kept %", _values([figures.retention for figures in whole], 1, 100)),
        ("range", [_range(figures.retention, 1, 100) for figures in whole]),
        ("MB", format_numbers([None if n is None else n * 1e-6 for n in touched])),
        ("of full", format_numbers([None if n is None else 100 * n / of for n in touched], 1)),
    ]
    return _table(rows, columns)


def _by_text(rows: Sequence[Row]) -> list[str]:
    columns = []
    for i, text in enumerate(rows[0].quality.by_text):
        of_text = [row.quality.by_text[i] for row in rows]
        perplexities = format_numbers([figures.perplexity.value for figures in of_text], 2)
        columns.append((str(text.text), perplexities))
        columns.append(("loss %", _values([figures.ratio for figures in of_text], 1, 100, -100)))
    return _table(rows, columns)


def _by_tier(rows: Sequence[Row]) -> list[str]:
    row_tiers = [(row, tier) for row in rows for tier in row.quality.by_tier]
    tiers = [tier for _, tier in row_tiers]
    columns = [
        ("tier", [tier.tier for tier in tiers]),
        ("events %", format_numbers(_times([tier.share for tier in tiers], 100), 1)),
        ("kept %", _values([tier.retention for tier in tiers], 1, 100)),
        ("range", [_range(tier.retention, 1, 100) for tier in tiers]),
        ("nll +", _values([tier.nll_increase for tier in tiers], 3)),
        ("range", [_range(tier.nll_increase, 3) for tier in tiers]),
    ]
    return _table([row for row, _ in row_tiers], columns, text=3)


def _cache(rows: Sequence[Row]) -> list[str]:
    cached_rows = [row for row in rows if row.quality.settings["budget"]]
    costs = [row.quality.costs for row in cached_rows]
    loaded = _times([cost["bytes_loaded_per_token"] for cost in costs], 1e-6)
    columns = [
        ("MB loaded/token", format_numbers(loaded)),
        ("tasks/token", format_numbers([cost["tasks_per_token"] for cost in costs], 2)),
        ("hit %", format_numbers(_times([cost["hit_rate"] for cost in costs], 100), 1)),
        ("part %", format_numbers(_times([cost["partial_hit_rate"] for cost in costs], 100), 1)),
    ]
    return _table(cached_rows, columns)


def _tasks(rows: Sequence[Row]) -> list[str]:
    row_scores = [(row, score) for row in rows for score in row.quality.tasks]
    scores = [score for _, score in row_scores]
    columns = [
        ("task", [score.task for score in scores]),
        ("metric", [score.metric for score in scores]),
        ("value", format_numbers([score.value for score in scores], 4)),
        ("±", format_numbers([score.stderr for score in scores], 4)),
        ("questions", [DASH if s.questions is None else f"{s.questions:,}" for s in scores]),
        ("shots", [DASH if s.shots is None else str(s.shots) for s in scores]),
    ]
    return _table([row for row, _ in row_scores], columns, text=4)


def _table(
    rows: Sequence[Row], columns: Sequence[tuple[str, list[str]]], text: int = 2
) -> list[str]:
    heads = [list(cells) for cells in zip(*(row.head for row in rows), strict=True)]
    names = ["policy", "width", *(name for name, _ in columns)]
    return align_columns(names, [*heads, *(cells for _, cells in columns)], text)


def _values(
    figures: Sequence[Estimate | None], decimals: int, factor: float = 1, shift: float = 0
) -> list[str]:
    # rounded, and 0 added, so that a loss of nothing is not printed as -0.0
    values = [
        None if one is None else round(one.value * factor + shift, decimals) + 0.0
        for one in figures
    ]
    return format_numbers(values, decimals)


def _range(figure: Estimate | None, decimals: int, factor: float = 1, shift: float = 0) -> str:
    if figure is None or figure.interval is None:
        return DASH
    return "..".join(f"{end * factor + shift:z,.{decimals}f}" for end in figure.interval)


def _times(values: Sequence[float | None], factor: float) -> list[float | None]:
    return [None if value is None else value * factor for value in values]


def format_notes(rows: Sequence[Row], spec: ModelSpec) -> list[str]:
    """Return what has to be said below the tables, in lines that fit."""
    policies = [(row.width, row.quality.settings["policy"]) for row in rows]
    full = {short: policy["width"] for short, policy in policies if short != policy["width"]}
    lines = [f"{short}: {spelled}" for short, spelled in full.items()]
    lines += [
        "ppl: perplexity; loss: its increase; kept: tokens whose top prediction is that of full",
        "MB: of expert weights that are executed, a token; of full: in per cent",
    ]
    first, last = (rows[i].quality.settings["run"] for i in (0, -1))
    if first != last:
        lines.append(
            f"full: the model as it is{last.removeprefix(first).replace(', ', '; ')} for all others"
        )
    lines += describe_rounding((row.quality.settings["policy"]["width"] for row in rows), spec)
    lines += [
        f"routing of {name}: {rule}"
        for name, rule in {policy["name"]: policy.get("routing") for _, policy in policies}.items()
        if rule
    ]
    lines += _skipped(rows, spec)
    if rows[0].quality.settings["budget"]:
        lines.append(
            "full: without a cache, the reference; every window's first token is not scored"
        )
    if any(row.quality.by_tier for row in rows):
        lines.append(
            "events: a token's combinations in each layer of the pass that predicts it; an event's "
            "kept and nll (in nats) are its token's, whatever in its other events caused them: a "
            "token stands in several rows"
        )
    if len(rows[0].quality.by_text) > 1:
        lines.append("perplexity of several texts: over all their tokens together")
    ahead = [policy["name"] for _, policy in policies if policy["prefetch"] != "none"]
    if ahead:
        lines.append(f"{', '.join(dict.fromkeys(ahead))}: prefetch changes no widths")
    return [part for line in lines for part in wrap(line, _WIDTH, subsequent_indent=" " * 8)]


def _skipped(rows: Sequence[Row], spec: ModelSpec) -> list[str]:
    of = len(spec.moe_layers) * spec.top_k
    lines = []
    for row in rows:
        skipped = row.quality.costs["skipped_per_token"]
        if skipped:
            renormalized = row.quality.settings["renormalize"]
            where = "goes to the token's others" if renormalized else "is dropped"
            if "routing" in row.quality.settings["policy"]:
                where = "goes where the model's router would give it"
            lines.append(
                f"{' '.join(row.head)}: skips {skipped:.2f} of {of} experts a token, whose weight "
                f"{where}"
            )
    return lines
