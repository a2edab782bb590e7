"""``crisp explain``: where the time of a run went, and which bound is near."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from crisp.run.account import TimeAccount
    from crisp.run.result import Run

_ADVICE = {
    "compute": ["loading is nearly hidden: narrower widths or a faster processor would help"],
    "bytes": [
        "at this residency only fewer bytes help: a larger budget, narrower widths, fewer bits"
    ],
    "memory": [
        "loads and computations share one memory, and it is busy: no overlap helps, only fewer",
        "bytes, or experts that are used where they lie instead of copied",
    ],
    "order": [
        "no order within an event does much better; fewer bytes would help, or overlap between",
        "layers: a prefetcher that guesses well",
    ],
    "none": ["no stream is busy all the time: overlap would help"],
}
_RULE = ("the first", "there is none")
_UNKNOWN = "bounds are not known of a measured run; crisp compare lays it beside a simulated one"
_SHARED = ["link and compute share one memory and slow each other down: fewer bytes help both"]


def explain(
    file: Annotated[Path, typer.Argument(metavar="RUN.JSON", help="What --json wrote.")],
    run: Annotated[
        int | None, typer.Option(help="Which run of a list, from 1.  [default: all, a line each]")
    ] = None,
) -> None:
    """Say where the time of a run went, and which bound is near."""
    from crisp.run.result import load_runs, nth_run

    runs = load_runs(file)
    if run is not None or len(runs) == 1:
        number = 1 if run is None else run
        print("\n".join(explain_run(nth_run(runs, number, file), f"run {number} of {len(runs)}")))
    else:
        print("\n".join(explain_runs(runs, file)))


def explain_run(run: Run, which: str) -> list[str]:
    """Return the account of a run in a few lines; which: its number, in words."""
    from crisp.run.account import NEAR, time_account
    from crisp.units import format_bytes

    parts = time_account(run)
    metrics, bounds = run.metrics, parts.bounds
    lines = [
        *wrap(f"{which}: {_conditions(run)}", 100, subsequent_indent=" " * 4),
        f"{parts.total:.3f} ms a token:",
        _line(parts, parts.waits, "compute waits for loads"),
        _line(parts, parts.experts, "computing experts"),
        _line(parts, parts.layers, "router, attention and all else"),
        *_phases(run),
        f"link busy {_percent(metrics['link_busy'])}, compute {_percent(metrics['compute_busy'])}",
    ]
    if bounds is None:
        return [*lines, _UNKNOWN]
    loaded = (metrics["bytes_loaded"] or 0) / (metrics["tokens"] or 1)
    fewest = float(metrics["belady_bytes_per_token"] or 0)
    lines[-1:-1] = [
        "bounds:",
        _line(parts, bounds.io, f"bytes: {format_bytes(loaded)} a token at the link's bandwidth"),
        _line(parts, bounds.order, "order: each event's tasks in their best order"),
        _line(
            parts,
            bounds.belady,
            f"Belady: {format_bytes(fewest)} a token, what the best cache would load",
        ),
        _line(parts, bounds.compute, "compute: all experts at hand"),
    ]
    if bounds.memory is not None:
        lines.insert(-1, _line(parts, bounds.memory, "memory: all that both streams move"))
    unified = (run.settings.get("hardware") or {}).get("kind") == "unified"
    lines += [
        f"near bound: {parts.near} ({_RULE[parts.near == 'none']} of compute, bytes, memory and "
        f"order that makes up {100 * NEAR:.0f} % of the time)",
        *(_SHARED if unified and parts.near == "none" else _ADVICE[parts.near]),
    ]
    if not unified:  # there what one stream gains the other may lose
        lines.append(
            f"at most: a better order gains {parts.gain(bounds.order)}, perfect overlap between "
            f"layers {parts.gain(max(bounds.io, bounds.compute))}, and with a cache"
        )
        lines.append(
            f"that knows what will come {parts.gain(max(bounds.belady, bounds.compute))}, loading "
            f"nothing {parts.gain(bounds.compute)}"
        )
    return lines


def explain_runs(runs: list[Run], file: Path) -> list[str]:
    """Return a line for each run; file: where they are from."""
    from crisp.cli.output.columns import align_columns, format_numbers
    from crisp.run.account import NEAR, time_account

    accounts = [time_account(run) for run in runs]
    heads = ["run", "policy", "budget", "hardware", "ms/token"]
    columns = [
        [str(number) for number in range(1, len(runs) + 1)],
        [run.settings["policy"]["name"] for run in runs],
        [run.settings["budget"]["asked"] for run in runs],
        [_machine(run) for run in runs],
        format_numbers([parts.total for parts in accounts]),
    ]
    for head, part in (("waits %", "waits"), ("experts %", "experts"), ("other %", "layers")):
        heads.append(head)
        columns.append([f"{parts.share(getattr(parts, part)):.0f}" for parts in accounts])
    lines = [f"  {line}" for line in align_columns([*heads], columns, text=4)]
    near = ["near bound", *(parts.near for parts in accounts)]
    width = max(map(len, lines))
    return [
        *(f"{line:<{width}}  {bound}" for line, bound in zip(lines, near, strict=True)),
        "",
        "waits: compute idle until blocks arrive; other: router, attention and all else",
        f"a bound is near from {100 * NEAR:.0f} % of the time on: bytes over bandwidth, computing "
        "alone, memory that",
        "link and compute share, or each event's tasks in their best order",
        *([_UNKNOWN] if any(parts.bounds is None for parts in accounts) else []),
        f"More of one: crisp explain {file} --run 1",
    ]


def _line(parts: TimeAccount, part: float, what: str) -> str:
    return f"  {part:10.3f} ms  {parts.share(part):3.0f} %  {what}"


def _conditions(run: Run) -> str:
    from crisp.cli.output.run_tables import describe_policy
    from crisp.units import format_count

    settings = run.settings
    policy, model = settings["policy"], settings["model"]
    rows = format_count(settings["trace"]["rows"], "row")
    return (
        f"{policy['name']} at {settings['budget']['asked']} on {_machine(run)}; "
        f"{model['name']}, {format_count(model['n_layers'], 'layer')} in "
        f"{float(Fraction(model['bits'])):g} bits; {rows}, "
        f"phase {settings['phase']}, batch {settings['batch']}, granularity "
        f"{settings['granularity']}; {describe_policy(policy)}"
    )


def _machine(run: Run) -> str:
    """Return the name of the device that a run was measured on, or of its simulated machine."""
    device, hardware = run.settings.get("device"), run.settings.get("hardware")
    return str((device or hardware or {"name": "an unnamed machine"})["name"])


def _phases(run: Run) -> list[str]:
    """Return a line for each phase of a run of both, as far as they are known."""
    from crisp.run.metrics.phases import PHASES

    names = ("tokens", "ms_per_token", "stall_ms_per_token", "compute_ms_per_token",
             "layer_ms_per_token")  # fmt: skip
    of_phases = [[run.metrics[f"{phase}_{name}"] for name in names] for phase in PHASES]
    if any(value is None for values in of_phases for value in values):
        return []
    return [
        f"of {phase}, {tokens:,} tokens: {total:.3f} ms each, {waits:.3f} of it waits, "
        f"{experts:.3f} experts, {layers:.3f} all else"
        for phase, (tokens, total, waits, experts, layers) in zip(PHASES, of_phases, strict=True)
    ]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"
