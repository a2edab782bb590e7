"""The metrics that a report shows: how they are headed, in which unit, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable
from math import floor, log10
from typing import NamedTuple

MAIN, TIME, STREAMS, BOUNDS, AHEAD, HOST = "main", "time", "streams", "bounds", "prefetch", "host"
GROUPS = {
    MAIN: "speed, loads, energy",
    TIME: "time of a token",
    STREAMS: "streams",
    BOUNDS: "bounds",
    AHEAD: "prefetch",
    HOST: "host",
}


class Shown(NamedTuple):
    """A metric as it is shown."""

    metric: str
    head: str
    unit: str
    group: str
    meaning: str
    factor: float = 1.0
    decimals: int | None = None  # None: as the numbers need


_MB, _PERCENT = 1e-6, 100.0

SHOWN = (
    Shown("tokens_per_second", "speed", "tokens/s", MAIN, "decode rows over decode time"),
    Shown("prefill_tokens_per_second", "prefill", "tokens/s", MAIN, "prompt rows over their time"),
    Shown("ms_per_token_p50", "p50", "ms", MAIN, "time of a token, median"),
    Shown("ms_per_token_p95", "p95", "ms", MAIN, "time of a token, 95th percentile"),
    Shown("ms_per_token_p99", "p99", "ms", TIME, "time of a token, 99th percentile"),
    Shown("ttft_ms", "first token", "ms", MAIN, "time to the first token, mean over prompts"),
    Shown("bytes_per_token", "loaded", "MB/token", MAIN, "bytes loaded a token", _MB),
    Shown("hit_rate", "hits", "%", MAIN, "tasks all of whose blocks were there", _PERCENT, 1),
    Shown("partial_hit_rate", "partial", "%", MAIN, "tasks that found some blocks", _PERCENT, 1),
    Shown("skipped", "skipped", "pairs", MAIN, "(token, expert) pairs of width 0", 1, 0),
    Shown("energy_j_per_token", "energy", "J/token", MAIN, "gross"),
    Shown("energy_net_j_per_token", "above rest", "J/token", MAIN, "less the idle machine's"),
    Shown("stall_ms_per_token", "stall", "ms", TIME, "compute waits for blocks, a token"),
    Shown("compute_ms_per_token", "experts", "ms", TIME, "computing experts, a token"),
    Shown("layer_ms_per_token", "others", "ms", TIME, "router, attention and all else, a token"),
    Shown("link_busy", "link busy", "%", STREAMS, "share of the time", _PERCENT, 1),
    Shown("compute_busy", "compute busy", "%", STREAMS, "share of the time", _PERCENT, 1),
    Shown("compute_hidden", "hidden", "%", STREAMS, "experts' time, link busy", _PERCENT, 1),
    Shown("bubble", "bubble", "%", STREAMS, "share of time in which compute idles", _PERCENT, 1),
    Shown("io_bound_ms_per_token", "bytes", "ms", BOUNDS, "what was loaded, over bandwidth"),
    Shown("order_bound_ms_per_token", "order", "ms", BOUNDS, "best order of each event's tasks"),
    Shown("belady_bound_ms_per_token", "belady", "ms", BOUNDS, "fewest bytes, over bandwidth"),
    Shown("compute_bound_ms_per_token", "compute", "ms", BOUNDS, "nothing had to be loaded"),
    Shown("memory_bound_ms_per_token", "memory", "ms", BOUNDS, "all bytes moved, over bandwidth"),
    Shown("belady_bytes_per_token", "belady", "MB/token", BOUNDS, "fewest bytes possible", _MB),
    Shown("prefetch_useful_bytes", "useful", "MB", AHEAD, "there in time, and asked for", _MB),
    Shown("prefetch_late_bytes", "late", "MB", AHEAD, "asked for, still on their way", _MB),
    Shown("prefetch_wasted_bytes", "wasted", "MB", AHEAD, "not asked for", _MB),
    Shown("lookup_us_per_token", "widths", "µs/token", HOST, "looking up widths"),
    Shown("queue_us_per_token", "deciding", "µs/token", HOST, "in the scheduler"),
    Shown("coordination_us_per_token", "handing", "µs/token", HOST, "to and from the streams"),
)


class Chart(NamedTuple):
    """A chart against the budget. bounds: (name, metric), of time in ms unless ``bytes``."""

    metric: str
    title: str
    bounds: tuple[tuple[str, str], ...]


_TIME_BOUNDS = tuple(
    (name, f"{metric}_bound_ms_per_token")
    for name, metric in (
        ("io", "io"),
        ("best order", "order"),
        ("belady", "belady"),
        ("compute", "compute"),
    )
)
SPEED = Chart("tokens_per_second", "Throughput", _TIME_BOUNDS)
PREFILL = Chart("prefill_tokens_per_second", "Throughput of prefill", _TIME_BOUNDS)
BYTES = Chart("bytes_per_token", "Bytes loaded", (("belady", "belady_bytes_per_token"),))
ENERGY = Chart("energy_j_per_token", "Energy", ())


def by_metric(metric: str) -> Shown:
    """How a metric is shown."""
    return next(shown for shown in SHOWN if shown.metric == metric)


def decimals(values: Iterable[float | None]) -> int:
    """For three digits of all but the smallest twentieth of the numbers, four at most.

    >>> decimals([12.3, 0.5, None]), decimals([1200.0, 873.0]), decimals([0.0, None])
    (3, 0, 1)
    """
    sizes = sorted(abs(value) for value in values if value)
    if not sizes:
        return 1
    return min(4, max(0, 2 - floor(log10(sizes[len(sizes) // 20]))))
