"""What a run that was read from a file must have: all that is shown or compared, in its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.run.metrics.phases import OF_PHASES, TOTALS

COUNTS = (
    "total_ns", "tokens", "tasks", "hits", "partial_hits", "skipped", "blocks_loaded",
    "bytes_loaded", "initial_bytes",
)  # fmt: skip
NUMBERS = (
    "bytes_per_token", "hit_rate", "partial_hit_rate", "link_busy", "compute_busy",
    "compute_hidden", "link_hidden", "bubble", "stall_ms_per_token", "compute_ms_per_token",
    "layer_ms_per_token", "io_bound_ms_per_token", "order_bound_ms_per_token",
    "compute_bound_ms_per_token", "memory_bound_ms_per_token", "belady_bytes_per_token",
    "belady_bound_ms_per_token", "tokens_per_second",
    "ms_per_token_mean", "ms_per_token_p50", "ms_per_token_p95", "ms_per_token_p99", "ttft_ms",
    "prefill_tokens_per_second", "prefetch_useful_bytes", "prefetch_late_bytes",
    "prefetch_wasted_bytes", "energy_j_per_token", "energy_net_j_per_token",
)  # fmt: skip
NAMED_BY_PHASE = (*TOTALS, *OF_PHASES)
"""Numbers, too; files of an older crisp have none of them."""
_MOST = 1 << 63  # of a metric
_DEEPEST = 20  # levels of lists and objects: a run has seven

# a type, the words that are known, or what an object holds
_SETTINGS: dict[str, Any] = {
    "engine": ("simpy", "fast", "hw"),
    "trace": {"rows": int},
    "model": {},
    "policy": dict.fromkeys(("name", "width", "order", "cache", "scope", "unit", "prefetch"), str),
    "budget": {"asked": str},
    "phase": str,
    "batch": int,
    "granularity": str,
}
_MACHINES = {"hardware": {"name": str, "kind": str}, "device": {"name": str}}  # may be null
_PARTS: dict[str, Any] = {"settings": _SETTINGS, "metrics": {}, "unavailable": {}, "provenance": {}}


def check(run: Mapping[str, Any], where: str) -> None:
    """Raise CrispError, in one line that begins with ``where``, unless a run's four parts hold what
    the commands that read it ask for.
    """
    if not _shallow(run, _DEEPEST):
        raise CrispError(f"{where}: is nested more than {_DEEPEST} levels deep")
    _must_hold(run, _PARTS, "", where)
    settings, metrics = run["settings"], run["metrics"]
    for key, inner in _MACHINES.items():
        if settings.get(key) is not None:
            _must_hold(settings[key], inner, f"settings.{key}.", where)
    ModelSpec.from_dict(settings["model"], f"{where}: settings.model")
    older = "decode_tokens" not in metrics
    for name in (*COUNTS, *NUMBERS, *(() if older else NAMED_BY_PHASE)):
        value = metrics.get(name, "nothing")
        if name in COUNTS:
            good, expected = type(value) is int and 0 <= value <= _MOST, "a count"
        else:
            good = value is None or (type(value) in (int, float) and abs(value) <= _MOST)
            expected = "a number or null"
        if not good:
            raise _wrong(where, f"metrics.{name}", value, expected)
    if metrics["tokens"] < 1:
        raise _wrong(where, "metrics.tokens", metrics["tokens"], "at least 1")


def _must_hold(value: Any, inner: Mapping[str, Any], place: str, where: str) -> None:
    """Raise CrispError unless an object has all of ``inner``; place: its name and a dot, or ''."""
    if not isinstance(value, dict):
        raise _wrong(where, place.rstrip("."), value, "an object")
    for key, expected in inner.items():
        name, actual = f"{place}{key}", value.get(key)
        if isinstance(expected, dict):
            _must_hold(actual, expected, f"{name}.", where)
        elif isinstance(expected, tuple):
            if actual not in expected:
                raise _wrong(where, name, actual, " or ".join(expected))
        elif type(actual) is not expected:
            raise _wrong(where, name, actual, {str: "a text", int: "a whole number"}[expected])


def _shallow(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_shallow(one, levels - 1) for one in inner)


def _wrong(where: str, place: str, actual: object, expected: str) -> CrispError:
    return CrispError(f"{where}: {place}: found {actual!r:.40}, expected {expected}")
