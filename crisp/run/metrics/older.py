"""Metrics of files that an older crisp wrote, in today's names.

It divided times, bytes and joules by prompt and decoded tokens together. Of a run of one phase
these are that phase's; of a run of both they say nothing of either.
"""

from __future__ import annotations

from collections.abc import Mapping

from crisp.run.metrics.phases import (
    NOT_RUN,
    OF_ONE_PHASE,
    OF_PHASES,
    PHASES,
    TOTALS,
    Metrics,
    Why,
)

MIXED = "the file is of an older crisp, which divided by prompt and decoded tokens together"


def in_todays_names(
    metrics: Mapping[str, int | float | None], unavailable: Mapping[str, str], phase: str | None
) -> tuple[Metrics, Why]:
    """Return a run's metrics, and why some are None; today's own as they are.

    phase: of its settings: decode, prefill or all. What is not known is None, with a reason.
    """
    new, why = dict(metrics), dict(unavailable)
    if "decode_tokens" in metrics:
        return new, why
    new |= dict.fromkeys(OF_PHASES)
    tokens, link, total = (metrics.get(name) for name in ("tokens", "link_busy", "total_ns"))
    for name in TOTALS:
        old = f"{name.replace('_ns', '_ms')}_per_token"
        mean = metrics.get(old)
        new[name] = None if mean is None else mean * (tokens or 0)
        if name == "link_ns":
            new[name] = None if link is None else round(link * (total or 0))
        elif name.endswith("_ns") and mean is not None:
            new[name] = round(mean * (tokens or 0) * 1e6)
        if new[name] is None:
            why[name] = unavailable.get(old, "the file is of an older crisp, which did not say")
    run = _phases_run(metrics, phase)
    for name in PHASES:
        if name in run:
            continue
        new |= {f"{name}_tokens": 0, f"{name}_ns": 0}
        why |= {
            key: NOT_RUN[name] for key in OF_PHASES if key.startswith(name) and new[key] is None
        }
    for name in run:
        known = _of_phase(metrics, name, alone=len(run) == 1)
        new |= {f"{name}_{key}": value for key, value in known.items() if value is not None}
        for key in OF_PHASES:
            if key.startswith(name) and new[key] is None:
                old = key.removeprefix(f"{name}_") if len(run) == 1 else ""
                why[key] = unavailable.get(old, MIXED)
    if len(run) > 1:
        new |= dict.fromkeys(OF_ONE_PHASE)
        why |= {name: unavailable.get(name, MIXED) for name in OF_ONE_PHASE}
    return new, why


def _phases_run(metrics: Mapping[str, int | float | None], phase: str | None) -> tuple[str, ...]:
    """Return the phases of which rows were run, as far as an old file tells."""
    if phase in PHASES:
        return (phase,)
    names = {"decode": "ms_per_token_mean", "prefill": "prefill_tokens_per_second"}
    run = tuple(name for name in PHASES if metrics.get(names[name]) is not None)
    return run or PHASES


def _of_phase(
    metrics: Mapping[str, int | float | None], phase: str, alone: bool
) -> dict[str, int | float | None]:
    """Return what an old file says of a phase; alone: no other one was run."""
    speed = "tokens_per_second" if phase == "decode" else "prefill_tokens_per_second"
    known = {"tokens_per_second": metrics.get(speed)}
    if not alone:
        return known
    tokens, total, link = (metrics.get(name) for name in ("tokens", "total_ns", "link_busy"))
    known |= {"tokens": tokens, "ns": total}
    known |= {name: metrics.get(name) for name in OF_ONE_PHASE}
    if tokens and total is not None:
        known["ms_per_token"] = total / tokens / 1e6
        known["load_ms_per_token"] = None if link is None else link * total / tokens / 1e6
    return known
