"""Tables of runs for people: plain text that stays readable in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from crisp.cli.output.columns import DASH, align_columns, format_numbers
from crisp.cli.output.setup_lines import describe_setup
from crisp.cli.output.words import describe_rounding

if TYPE_CHECKING:
    from crisp.run.result import Run
    from crisp.run.setup import Setup

_WIDTH = 100


class Column(NamedTuple):
    """A metric as it is shown."""

    header: str
    metric: str
    factor: float = 1.0
    decimals: int | None = None  # None: as the numbers need


_DECODE = (
    Column("tokens/s", "tokens_per_second"),
    Column("p50 ms", "ms_per_token_p50"),
    Column("p95 ms", "ms_per_token_p95"),
)
_PREFILL = (Column("tokens/s", "prefill_tokens_per_second"), Column("ttft ms", "ttft_ms"))


def _rest(phase: str) -> tuple[Column, ...]:
    return (
        Column("hit %", "hit_rate", 100, 1),
        Column("part %", "partial_hit_rate", 100, 1),
        Column("MB/token", f"{phase}_bytes_per_token", 1e-6),
        Column("stall ms", f"{phase}_stall_ms_per_token"),
        Column("hid %", "compute_hidden", 100, 1),
        Column("J/token", f"{phase}_energy_j_per_token"),
    )


COLUMNS = {
    "decode": (*_DECODE, *_rest("decode")),
    "prefill": (*_PREFILL, *_rest("prefill")),
    "all": (*_DECODE, Column("ttft ms", "ttft_ms"), *_rest("decode")),
}
_MEANINGS = {
    "decode": ("p50, p95: time of a token, median and 95th percentile",),
    "prefill": ("ttft: time to the first token, the mean over prompts",),
    "all": (
        "tokens/s, p50, p95, MB, stall and J are of decoded tokens; hit, part and hid of all",
        "ttft: time to the first token, the mean over prompts",
    ),
}
_COMMON_MEANINGS = (
    "hit, part: tasks that find all, or some, of their blocks resident",
    "stall: compute idle, a token; hid: of experts' compute time, while the link is busy",
)


def format_report(setup: Setup, runs: Sequence[Run], promises: Sequence[str] = ()) -> str:
    """Return the conditions, the table, and what has to be said below it.

    promises: lines about losses that were asked for.
    """
    lines = [
        *describe_setup(setup),
        *promises,
        "",
        *format_table(runs, setup.conditions.phase),
        "",
        *format_notes(setup, runs),
    ]
    return "\n".join(lines)


def format_table(runs: Sequence[Run], phase: str) -> list[str]:
    """Return a line for each run, below a line of headings."""
    columns = COLUMNS[phase]
    cells = [
        [run.settings["policy"]["name"] for run in runs],
        [run.settings["budget"]["asked"] for run in runs],
        *(format_numbers(scaled_values(column, runs), column.decimals) for column in columns),
    ]
    return align_columns(
        ["policy", "budget", *(column.header for column in columns)], cells, text=2
    )


def scaled_values(column: Column, runs: Iterable[Run]) -> list[float | None]:
    """Return a metric of all runs, in the column's unit."""
    values = (run.metrics[column.metric] for run in runs)
    return [None if value is None else value * column.factor for value in values]


def format_notes(setup: Setup, runs: Sequence[Run]) -> list[str]:
    """Return what has to be said below a table, in lines that fit."""
    phase = setup.conditions.phase
    policies = [run.settings["policy"] for run in _each_policy(runs)]
    lines = [f"{policy['name'] + ':':<7} {describe_policy(policy)}" for policy in policies]
    lines += _budgets(setup, runs)
    lines += [*_MEANINGS[phase], *_COMMON_MEANINGS]
    missing: dict[str, list[str]] = {}
    for column in COLUMNS[phase]:
        for run in runs:
            if run.metrics[column.metric] is None:
                heads = missing.setdefault(run.unavailable[column.metric], [])
                if column.header not in heads:
                    heads.append(column.header)
    lines += [f"{', '.join(heads)} {DASH}: {reason}" for reason, heads in missing.items()]
    lines += _speeds(runs)
    if any(run.metrics["energy_j"] is not None for run in runs):
        lines += _joules(runs)
    lines += describe_rounding((policy["width"] for policy in policies), setup.spec)
    lines += [line for rule in _NOTES if (line := rule(setup, runs))]
    return [part for line in lines for part in wrap(line, _WIDTH, subsequent_indent=" " * 8)]


def _each_policy(runs: Sequence[Run]) -> list[Run]:
    return list({run.settings["policy"]["name"]: run for run in runs}.values())


def units_held(budget: str, setup: Setup, policy: dict[str, Any]) -> tuple[int, int, int]:
    """Return (whole units that a budget holds, of how many, parts of the cache that hold none)."""
    from crisp.policy import Budget
    from crisp.policy.policy import read_cache

    spec, cache = setup.spec, read_cache(policy["cache"], policy["scope"], policy["unit"], 0)
    parts = Budget.parse(budget).capacity(spec, cache)
    per_unit = spec.n_blocks if cache.unit == "expert" else 1
    return sum(parts) // per_unit, spec.n_routed * spec.n_blocks // per_unit, parts.count(0)


def _budgets(setup: Setup, runs: Sequence[Run]) -> list[str]:
    """Say what is left of each budget, which is floored to whole units."""
    if _is_mapped(setup):
        return []
    lines = {}
    for run in runs:
        policy, budget = run.settings["policy"], run.settings["budget"]["asked"]
        if policy["cache"] == "none":
            continue
        units, of, empty = units_held(budget, setup, policy)
        line = f"budget {budget}: {units:,} of {of:,} {policy['unit']}s, {100 * units / of:.1f} %"
        if empty and policy["scope"] == "layer":
            layers = len(setup.spec.moe_layers)
            line += f"; {empty} of {layers} layers {'holds' if empty == 1 else 'hold'} none"
        lines[budget] = line
    return list(lines.values())


def describe_policy(policy: dict[str, Any]) -> str:
    """Describe a run's policy."""
    cache = "no cache"
    if policy["cache"] != "none":
        scope = "per layer" if policy["scope"] == "layer" else "for all layers"
        cache = f"cache {policy['cache']} {scope} by {policy['unit']}"
    ahead = {
        "none": "",
        "guess": ", prefetches what the trace guessed",
        "previous": ", prefetches what the previous token used",
        "frequent": ", prefetches what usually follows",
        "perfect": ", prefetches what comes next",
    }.get(policy["prefetch"], f", prefetches by {policy['prefetch']}")
    oracle = f"; {policy['oracle']} is an oracle" if "oracle" in policy else ""
    routing = f", routing {policy['routing']}" if "routing" in policy else ""
    return f"width {policy['width']}{routing}, {policy['order']}, {cache}{ahead}{oracle}"


def _part_of_a_model(setup: Setup, runs: Sequence[Run]) -> str | None:
    if setup.spec.n_layers == setup.whole.n_layers:
        return None
    return f"times are of these {setup.spec.n_layers} layers, not of the whole model"


def _quality(setup: Setup, runs: Sequence[Run]) -> str | None:
    names = [
        run.settings["policy"]["name"]
        for run in _each_policy(runs)
        if run.settings["policy"]["width"] != "full"
    ]
    if not names:
        return None
    leave = "leaves" if len(names) == 1 else "leave"
    return f"quality is not simulated: {', '.join(names)} {leave} out parts of experts"


def _global_lru(setup: Setup, runs: Sequence[Run]) -> str | None:
    spec = setup.spec
    most = (len(spec.moe_layers) - 1) * spec.top_k
    for run in runs:
        policy, budget = run.settings["policy"], run.settings["budget"]
        if (
            [policy[part] for part in ("cache", "scope", "width", "prefetch")]
            == ["lru", "global", "full", "none"]
            and setup.conditions.batch == 1
            and budget["blocks"] <= most * spec.n_blocks
        ):
            return (
                "warning: a global LRU of at most (layers - 1) x k experts never hits at batch 1 "
                f"and full width; here {most}, and {budget['asked']} is "
                f"{budget['blocks'] / spec.n_blocks:g}"
            )
    return None


def _is_mapped(setup: Setup) -> bool:
    return setup.hardware is not None and setup.hardware.loads_from == "mapped"


def _speeds(runs: Sequence[Run]) -> list[str]:
    """Say how well the speeds of runs that were repeated are known."""
    from crisp.cli.output.measured import describe_speed

    return [f"{_name(run)}: {speed}" for run in runs if (speed := describe_speed(run)) is not None]


def _name(run: Run) -> str:
    return f"{run.settings['policy']['name']} at {run.settings['budget']['asked']}"


def _joules(runs: Sequence[Run]) -> list[str]:
    """Say where a table's joules come from, and how well those of measured runs are known."""
    from crisp.cli.output.measured import describe_joules, describe_source

    metered = [run for run in runs if run.provenance["energy"]]
    lines = [f"J/token: {describe_source(metered[0])}"]
    for run in metered:
        if run.settings["engine"] == "hw":
            first, *more = describe_joules(run)
            lines += [f"{_name(run)}: {first}", *more]
    return lines


def _mapped(setup: Setup, runs: Sequence[Run]) -> str | None:
    if not _is_mapped(setup):
        return None
    return f"{setup.machine} computes experts where they lie: no loads, no budget"


def _static(setup: Setup, runs: Sequence[Run]) -> str | None:
    for run in runs:
        if run.metrics["initial_bytes"] and not _is_mapped(setup):
            return "static: what it holds from the start is loaded before the run and not timed"
    return None


def _anchors(setup: Setup, runs: Sequence[Run]) -> str | None:
    by_anchor = any(run.settings["policy"]["width"][:6] in ("tiered", "single") for run in runs)
    if not by_anchor or setup.inputs.trace.header.ordered:
        return None
    return "the trace is not sorted by router weight: a layer's more frequent expert is the anchor"


_NOTES: tuple[Callable[[Setup, Sequence[Run]], str | None], ...] = (
    _part_of_a_model,
    _quality,
    _static,
    _anchors,
    _mapped,
    _global_lru,
)
