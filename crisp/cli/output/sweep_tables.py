"""What a sweep has found, for people: a few of its rows, and pairs with a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nlargest
from pathlib import Path

from crisp.cli.output.columns import DASH, align_columns, format_numbers
from crisp.errors import CrispError
from crisp.policy import policy_name
from crisp.policy.policy import ALIASES
from crisp.report.caveats import RUN_KIND_FIELDS, RunKind, caveats
from crisp.report.conditions import format_bits
from crisp.run.metrics.phases import PHASES
from crisp.sim.sweep.paired import paired_ratios
from crisp.sim.sweep.results import Row, Scalar, load_rows, load_sequences
from crisp.sim.sweep.spec import KEYS, PARTS, Sweep
from crisp.statistics import LEVEL, RESAMPLES, Estimate
from crisp.units import format_count

_SHOWN = 24  # rows
_ASKED = "asked."
_COLUMNS = (
    ("tokens/s", "tokens_per_second", 1.0, None),
    ("hit %", "hit_rate", 100.0, 1),
    ("MB/token", "bytes_per_token", 1e-6, None),
    ("J/token", "energy_j_per_token", 1.0, None),
)
_OF_A_PHASE = [metric for _, metric, _, _ in _COLUMNS if metric != "hit_rate"]
_TITLE = (
    *RUN_KIND_FIELDS, "refused", "asked.trace", "trace.rows", "profile.from", "model.bits",
    "hardware.name", "phase", "batch", "granularity",
)  # fmt: skip
_READ = (
    "cell", "refused", "policy.name", "phase", "hit_rate",
    *(f"{phase}_{metric}" for phase in PHASES for metric in _OF_A_PHASE),
)  # fmt: skip


def check_baseline(sweep: Sweep, against: str) -> None:
    """Raise CrispError unless the sweep has such a policy."""
    try:
        policy_name(against)
    except CrispError as error:
        raise CrispError(f"--against: {error}") from error
    policies = [axis.values for grid in sweep.grids for axis in grid.axes if axis.key == "policy"]
    names = {ALIASES.get(value, value) for values in policies for value in values}
    if ALIASES.get(against, against) not in names:
        raise CrispError(f"--against {against}: {sweep.name} has no cell of this policy")


def check_batch(sweep: Sweep, option: str) -> None:
    """Raise CrispError unless every step of every cell belongs to one sequence."""
    for grid in sweep.grids:
        for axis in grid.axes:
            if axis.key == "batch" and list(axis.values) != ["1"]:
                raise CrispError(f"{option}: sequences run side by side; {axis.where} must be 1")


def format_summary(out: str) -> list[str]:
    """Return what all rows of a file share, the fastest of them as a table, what was refused."""
    varied, n, refused = _varied(load_rows(Path(out), _wanted)), 0, list[str]()
    for row in load_rows(Path(out), _wanted):
        n += 1
        if row["refused"] is not None:
            refused.append(str(row["refused"]))
    rows = (row for row in load_rows(Path(out), _wanted) if row["refused"] is None)
    if n - len(refused) <= _SHOWN:
        shown, lines = list(rows), []
    else:
        shown = nlargest(_SHOWN, rows, key=lambda row: _value(row, "tokens_per_second") or 0)
        lines = [f"the {_SHOWN} fastest of {n:,}"]
    lines = [
        "",
        *_title(out),
        "",
        *lines,
        *_table(varied, shown),
        "",
        f"{format_count(n, 'row')} in {out}",
    ]
    if any(row.get("phase") == "all" for row in shown):
        lines.append("phase all: tokens/s, MB and J are of decoded tokens; hits of all")
    if refused:
        lines.append(f"refused: {format_count(len(refused), 'cell')}, such as: {refused[0]}")
    return lines


def _wanted(column: str) -> bool:
    return column.startswith(_ASKED) or column in _READ


def _title(out: str) -> list[str]:
    """Return the conditions that all rows share, a line each, and caveats of their figures."""
    values: dict[str, set[Scalar]] = {}
    kinds: dict[RunKind, None] = {}
    for row in load_rows(Path(out), _TITLE.__contains__):
        if row["refused"] is None:
            for name, value in row.items():
                if value is not None:
                    values.setdefault(name, set()).add(value)
            kinds[RunKind(*(_text(row.get(name)) for name in RUN_KIND_FIELDS))] = None
    shared = {
        name: _text(next(iter(distinct))) for name, distinct in values.items() if len(distinct) == 1
    }
    bits, rows = format_bits(shared.get("model.bits")), shared.get("trace.rows")
    lines = {
        "trace": (
            ("{}", shared.get("asked.trace")),
            ("{} rows", f"{int(rows):,}" if rows and rows.isdecimal() else None),
            ("routing of {}", shared.get("trace.model")),
        ),
        "profile": (("{}", (shared.get("profile.from") or "").removeprefix("profile: ")),),
        "model": (
            ("{}", shared.get("model.name")),
            ("experts in {} bits", bits),
        ),
        "hardware": (("{}", shared.get("hardware.name")),),
        "run": tuple((key + " {}", shared.get(key)) for key in ("phase", "batch", "granularity")),
    }
    title = []
    for name, parts in lines.items():
        text = ", ".join(words.format(value) for words, value in parts if value)
        title += [f"{name:<10}{text}"] if text else []
    return [*title, *(f"{'':10}{line}" for line in caveats(kinds))]


def _text(value: Scalar) -> str | None:
    return None if value is None else str(value)


def _table(varied: Sequence[str], rows: Sequence[Row]) -> list[str]:
    cells = [[_shown(row.get(name)) for row in rows] for name in varied]
    headings = [name.removeprefix(_ASKED) for name in varied]
    for heading, metric, factor, decimals in _COLUMNS:
        metrics = [_value(row, metric) for row in rows]
        cells.append(format_numbers([None if v is None else v * factor for v in metrics], decimals))
        headings.append(heading)
    return align_columns(headings, cells, text=len(varied))


def _value(row: Row, metric: str) -> float | None:
    """Return a metric of a row: of decoded tokens, of prompts' where those alone were run."""
    phase = "prefill" if row.get("phase") == "prefill" else "decode"
    value = row.get(f"{phase}_{metric}" if metric in _OF_A_PHASE else metric)
    return None if value is None else float(value)


def _shown(value: object) -> str:
    return DASH if value is None else str(value)


def format_comparison(out: str, beside: str, against: str) -> list[str]:
    """Return every row beside the baseline's at the same other settings, as a table."""
    sequences = load_sequences(Path(beside))
    rows = [row for row in load_rows(Path(out), _wanted) if row["cell"] in sequences]
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(_conditions(row), []).append(row)
    pairs, alone = [], 0
    for group in groups.values():
        baselines = _baselines(group, against)
        alone += len(group) if not baselines else 0
        for row in group if baselines else ():
            base = max(baselines, key=lambda other: _alike(row, other))
            if base is not row:
                pairs.append(
                    (row, paired_ratios(sequences[str(row["cell"])], sequences[str(base["cell"])]))
                )
    varied = _varied(row for row, _ in pairs)
    columns = [[_shown(row.get(name)) for row, _ in pairs] for name in varied]
    columns += [[_ratio(pair.bytes_per_token) for _, pair in pairs]]
    columns += [[_ratio(pair.ms_per_token) for _, pair in pairs]]
    headings = [name.removeprefix(_ASKED) for name in varied]
    lines = align_columns([*headings, "bytes/token", "ms/token"], columns, text=len(columns))
    lines += ["", f"times those of {against} at the same other settings; in brackets {LEVEL} % "
              f"bootstrap over sequences, {RESAMPLES:,} resamples"]  # fmt: skip
    if alone:
        lines.append(f"without one of {against} beside them: {format_count(alone, 'row')}")
    return lines


def _baselines(group: Sequence[Row], against: str) -> list[Row]:
    """Return the rows of the policy with the fewest parts replaced."""
    candidates = [row for row in group if row.get("policy.name") == policy_name(against)]
    replaced = [sum(row.get(_ASKED + part) is not None for part in PARTS) for row in candidates]
    return [row for row, n in zip(candidates, replaced, strict=True) if n == min(replaced)]


def _conditions(row: Row) -> tuple[object, ...]:
    """Return all settings that were asked for but the policy."""
    return tuple(row.get(_ASKED + key) for key in KEYS if key not in ("policy", *PARTS))


def _alike(row: Row, other: Row) -> int:
    """Return how many parts of the policy are the same."""
    return sum(row.get(_ASKED + part) == other.get(_ASKED + part) for part in PARTS)


def _varied(rows: Iterable[Row]) -> list[str]:
    """Return the keys that differ among rows; the policy, if none does."""
    first: Row | None = None
    names: dict[str, bool] = {}
    for row in rows:
        first = first or row
        for name in row:
            key = name.removeprefix(_ASKED)
            if key != name and key in KEYS:  # {names} stand in the spellings
                names[name] = names.get(name, False) or row[name] != first.get(name)
    return [name for name, differs in names.items() if differs] or [_ASKED + "policy"]


def _ratio(estimate: Estimate | None) -> str:
    if estimate is None:
        return DASH
    if estimate.interval is None:
        return f"{estimate.value:.3f}"
    low, high = estimate.interval
    return f"{estimate.value:.3f} ({low:.3f} to {high:.3f})"
