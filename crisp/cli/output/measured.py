"""Measured figures for people: how much, how well that is known, and where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10
from typing import TYPE_CHECKING, Any

from crisp.cli.output.columns import format_numbers

if TYPE_CHECKING:
    from crisp.run.result import Run

_NOTICED = 0.05  # of a run's joules, which the meter leaves open: where no other share was asked


def describe_source(run: Run) -> str:
    """Describe where the joules of a run come from."""
    origin = run.provenance["energy"]
    return f"{origin['method'].partition(':')[0]}, from {origin['source']}"


def describe_joules(run: Run) -> list[str]:
    """Describe the joules of a run that has them, gross and net, a line each: a token of one phase,
    else of all.
    """
    from crisp.run.repeats import half_width

    parts = list[str]()
    for before, after, unit in (
        ("decode_", "_per_token", "J/token"),
        ("prefill_", "_per_token", "J/token of prompts"),
        ("", "", "J in all"),
    ):
        names = [f"{before}energy_{kind}j{after}" for kind in ("", "net_")]
        if run.metrics[names[0]] is None or (not before and parts):
            continue
        gross, net = (format_with_error(run.metrics[name], half_width(run, name)) for name in names)
        parts.append(f"{gross} {unit}, of it {net} above rest")
        if run.metrics[names[1]] is None:
            parts[-1] += f" ({run.unavailable[names[1]]})"
    text, repeats = "; ".join(parts), run.provenance.get("repeats")
    if repeats is not None:
        text += f"; {describe_repeats(repeats['runs'], repeats['ended'])}"
        return [text, *short_window_notes(repeats["windows"], repeats["within"])]
    window = {"joules": run.metrics["energy_j"], **run.provenance["energy"]}
    return [text, *short_window_notes([window], None)]


def describe_speed(run: Run) -> str | None:
    """Describe the speed of a run that was repeated; None: it was not."""
    from crisp.run.repeats import half_width

    repeats = run.provenance.get("repeats")
    if repeats is None:
        return None
    parts = [
        f"{format_with_error(run.metrics[name], half_width(run, name))} {unit}"
        for name, unit in (
            ("tokens_per_second", "tokens/s"),
            ("ms_per_token_p50", "ms p50"),
            ("prefill_tokens_per_second", "prompt tokens/s"),
            ("ttft_ms", "ms to the first"),
        )
        if run.metrics[name] is not None
    ]
    return f"{', '.join(parts)}; {describe_repeats(repeats['runs'], repeats['ended'])}"


def describe_repeats(runs: int, ended: str) -> str:
    """Say what stands before and behind a ±, and why there were no more runs."""
    if runs == 1:
        return f"one run: {ended}"
    return f"means of {runs} runs and their 95 % intervals: {ended}"


def format_with_error(value: float | None, half_width: float | None) -> str:
    """Format a value, and behind ± what it may be off by, as far as that is known."""
    if value is None or not half_width:
        return format_numbers([value])[0]
    digits = max(0, 1 - floor(log10(half_width)))  # two of what is uncertain
    return " ± ".join(format_numbers([value, half_width], min(digits, 6)))


def short_window_notes(runs: Sequence[dict[str, Any]], within: float | None) -> list[str]:
    """Return a warning if a run's window is short, judged by what the meter leaves open of it.

    runs: the ``joules``, ``window_ns`` and ``uncertainty_j`` of each, where they are known. within:
    the share of the joules that was asked for.
    """
    left_open = [
        (run["uncertainty_j"] / run["joules"], run["window_ns"])
        for run in runs
        if run.get("uncertainty_j") is not None and run["joules"]
    ]
    share, window = max(left_open, default=(0, 0))
    if share <= (within or _NOTICED):
        return []
    return [
        f"a window of {window / 1e9:.3g} s is short for this meter, which leaves "
        f"{100 * share:.2g} % of its joules open: a longer run says more"
    ]
