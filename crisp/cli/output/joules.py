"""Joules for people: how much, how well that is known, and where it comes from."""

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
    """Describe the joules a token of a run that has them, gross and net, a line each."""
    gross, net = (run.metrics[f"energy_{kind}j_per_token"] for kind in ("", "net_"))
    origin = run.provenance["energy"]
    repeats = origin.get("repeats", {})
    halves = [repeats.get(f"half_width_{kind}j_per_token") for kind in ("", "net_")]
    gross_text, net_text = (
        format_with_error(value, half) for value, half in zip((gross, net), halves, strict=True)
    )
    text = f"{gross_text} J/token, of it {net_text} above rest"
    if net is None:
        text += f" ({run.unavailable['energy_net_j_per_token']})"
    each = repeats.get("each")
    if each is None:
        each = [{"joules": (gross or 0) * (run.metrics["tokens"] or 0), **origin}]
    else:
        text += f"; {describe_repeats(len(each), repeats['ended'])}"
    return [text, *short_window_notes(each, repeats.get("within"))]


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
