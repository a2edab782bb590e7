"""The metrics that a report shows: their headings, units and meanings."""

from __future__ import annotations

from collections.abc import Iterable
from math import floor, log10
from typing import NamedTuple

MAIN, TIME, PROMPTS, STREAMS = "main", "time", "prompts", "streams"
BOUNDS, AHEAD, HOST = "bounds", "prefetch", "host"
GROUPS = {
    MAIN: "speed, loads, energy",
    TIME: "time of a decoded token",
    PROMPTS: "a prompt's token",
    STREAMS: "streams",
    BOUNDS: "bounds",
    AHEAD: "prefetch",
    HOST: "host",
}


class Metric(NamedTuple):
    """A metric as a report shows it."""

    metric: str
    head: str
    unit: str
    group: str
    meaning: str
    factor: float = 1.0
    decimals: int | None = None  # None: as the numbers need


_MB, _PERCENT = 1e-6, 100.0

SHOWN = (
    Metric("tokens_per_second", "speed", "tokens/s", MAIN, "decode rows over decode time"),
    Metric("prefill_tokens_per_second", "prefill", "tokens/s", MAIN, "prompt rows over their time"),
    Metric("ms_per_token_p50", "p50", "ms", MAIN, "time of a token, median"),
    Metric("ms_per_token_p95", "p95", "ms", MAIN, "time of a token, 95th percentile"),
    Metric("ms_per_token_p99", "p99", "ms", TIME, "time of a token, 99th percentile"),
    Metric("ttft_ms", "first token", "ms", MAIN, "time to the first token, mean over prompts"),
    Metric("decode_bytes_per_token", "loaded", "MB/token", MAIN, "bytes a decoded token", _MB),
    Metric("hit_rate", "hits", "%", MAIN, "tasks all of whose blocks were there", _PERCENT, 1),
    Metric("partial_hit_rate", "partial", "%", MAIN, "tasks that found some blocks", _PERCENT, 1),
    Metric("skipped", "skipped", "pairs", MAIN, "(token, expert) pairs of width 0", 1, 0),
    Metric("decode_energy_j_per_token", "energy", "J/token", MAIN, "gross, a decoded token"),
    Metric(
        "decode_energy_net_j_per_token", "above rest", "J/token", MAIN, "less the idle machine's"
    ),
    *(
        Metric(f"{phase}_{part}_per_token", head, "ms", group, f"{meaning}, a token")
        for phase, group in (("decode", TIME), ("prefill", PROMPTS))
        for part, head, meaning in (
            ("stall_ms", "stall", "compute waits for blocks"),
            ("compute_ms", "experts", "computing experts"),
            ("layer_ms", "others", "router, attention and all else"),
            ("load_ms", "loads", "link busy"),
        )
    ),
    Metric("prefill_bytes_per_token", "loaded", "MB/token", PROMPTS, "bytes loaded a token", _MB),
    Metric("prefill_energy_j_per_token", "energy", "J/token", PROMPTS, "gross"),
    Metric(
        "prefill_energy_net_j_per_token",
        "above rest",
        "J/token",
        PROMPTS,
        "less the idle machine's",
    ),
    Metric("link_busy", "link busy", "%", STREAMS, "share of the time", _PERCENT, 1),
    Metric("compute_busy", "compute busy", "%", STREAMS, "share of the time", _PERCENT, 1),
    Metric("compute_hidden", "hidden", "%", STREAMS, "experts' time, link busy", _PERCENT, 1),
    Metric("bubble", "bubble", "%", STREAMS, "share of time in which compute idles", _PERCENT, 1),
    Metric("io_bound_ms_per_token", "bytes", "ms", BOUNDS, "what was loaded, over bandwidth"),
    Metric("order_bound_ms_per_token", "order", "ms", BOUNDS, "best order of each event's tasks"),
    Metric("belady_bound_ms_per_token", "belady", "ms", BOUNDS, "fewest bytes, over bandwidth"),
    Metric("compute_bound_ms_per_token", "compute", "ms", BOUNDS, "nothing had to be loaded"),
    Metric("memory_bound_ms_per_token", "memory", "ms", BOUNDS, "all bytes moved, over bandwidth"),
    Metric("belady_bytes_per_token", "belady", "MB/token", BOUNDS, "fewest bytes possible", _MB),
    Metric("prefetch_useful_bytes", "useful", "MB", AHEAD, "there in time, and asked for", _MB),
    Metric("prefetch_late_bytes", "late", "MB", AHEAD, "asked for, still on their way", _MB),
    Metric("prefetch_wasted_bytes", "wasted", "MB", AHEAD, "not asked for", _MB),
    Metric("lookup_us_per_token", "widths", "µs/token", HOST, "looking up widths"),
    Metric("queue_us_per_token", "deciding", "µs/token", HOST, "in the scheduler"),
    Metric("coordination_us_per_token", "handing", "µs/token", HOST, "to and from the streams"),
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
_BYTES_BOUNDS = (("belady", "belady_bytes_per_token"),)
BYTES = Chart("decode_bytes_per_token", "Bytes loaded", _BYTES_BOUNDS)
PREFILL_BYTES = Chart("prefill_bytes_per_token", "Bytes loaded for prompts", _BYTES_BOUNDS)
ENERGY = Chart("decode_energy_j_per_token", "Energy", ())
PREFILL_ENERGY = Chart("prefill_energy_j_per_token", "Energy of prompts", ())


def find_metric(metric: str) -> Metric:
    """Return how a metric is shown."""
    return next(shown for shown in SHOWN if shown.metric == metric)


def decimals(values: Iterable[float | None]) -> int:
    """Return the decimals that give three digits to all but the smallest twentieth; at most four.

    >>> decimals([12.3, 0.5, None]), decimals([1200.0, 873.0]), decimals([0.0, None])
    (3, 0, 1)
    """
    sizes = sorted(abs(value) for value in values if value)
    if not sizes:
        return 1
    return min(4, max(0, 2 - floor(log10(sizes[len(sizes) // 20]))))
