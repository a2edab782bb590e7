"""The routing on which claims are tested: drawn from statistics of a real Mixtral, or given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from crisp.errors import CrispError
from crisp.reproduce.claims import printed
from crisp.reproduce.measured import routing_statistics
from crisp.trace import DECODE, PREFILL, RoutingTrace
from crisp.trace.chains import PairChain, fit_chain
from crisp.trace.describe import percent_of
from crisp.trace.synth import synthesize

ROWS, SEQUENCES, SEED = 4800, 24, 0  # half of them are counted, the others run
GENERATED = 128  # tokens after a prompt
LENGTHS = (128, 512, 1024, 2048)  # of a prompt, as in Figure 17
_SCALE = 10**6  # shares become counts


def draw_trace(
    progress: Callable[[float], None] = lambda share: None, *, skewed: bool = False
) -> RoutingTrace:
    """Draw a trace of Mixtral-8x7B's 32 layers that has its mean statistics in every layer.

    How unequal pairs are, and how many experts a token has in common with the one before, are the
    real model's means over layers; which pairs are the frequent ones is drawn. A cache depends on
    the first two: it loads within 3 % of what it loads where every layer has its own statistics.

    skewed: pairs are as unequal as in the paper's Figure 3 instead (`figure3_shares`).
    """
    statistics = routing_statistics()
    note = f"drawn from {statistics['source']}"
    if skewed:
        statistics = {**statistics, "pair_shares": figure3_shares(statistics["pair_shares"])}
        note += "; pairs as unequal as in the paper's Figure 3"
    draw = np.random.default_rng(SEED)
    chains = {layer: _chain(statistics, draw) for layer in range(statistics["layers"])}
    trace = synthesize(
        chains,
        ROWS,
        SEED,
        sequences=SEQUENCES,
        note=note,
        progress=progress,
    )
    return replace(
        trace,
        header=replace(trace.header, model="Mixtral-8x7B", dataset="MT-Bench (statistics)"),
    )


def figure3_shares(shares: Sequence[float]) -> list[float]:
    """Return shares of the pairs, falling, made as unequal as Figure 3 has them.

    The most frequent 25 % take what it prints at least, the least frequent 29 % what it prints at
    most, the others the rest; within each of the three, shares keep their proportions.
    """
    n = len(shares)
    top, bottom = printed("F3.top25") / 100, printed("F3.bottom29") / 100
    ends = [0, percent_of(25, n), n - percent_of(29, n), n]
    scaled: list[float] = []
    for start, end, taken in zip(ends, ends[1:], (top, 1 - top - bottom, bottom), strict=False):
        group = shares[start:end]
        scaled += [share * taken / sum(group) for share in group]
    return sorted(scaled, reverse=True)


def with_prompt(trace: RoutingTrace, length: int) -> RoutingTrace:
    """Return the first rows of a trace as one sequence: a prompt, then ``GENERATED`` tokens.

    Raises CrispError if it has too few rows.
    """
    rows = length + GENERATED
    if trace.rows < rows:
        raise CrispError(f"a prompt of {length} tokens: {rows} rows needed, found {trace.rows}")
    phase = np.where(np.arange(rows) < length, PREFILL, DECODE)
    return replace(
        trace.select(slice(0, rows)),
        sequence=np.zeros(rows, np.int32),
        position=np.arange(rows, dtype=np.int32),
        phase=phase.astype(np.uint8),
    )


def _chain(statistics: dict[str, Any], draw: np.random.Generator) -> PairChain:
    """Return one layer's chain: the shares, dealt to the pairs at random."""
    shares = np.array(statistics["pair_shares"])
    n = round((1 + np.sqrt(1 + 8 * len(shares))) / 2)
    pairs = np.stack(np.triu_indices(n, 1), axis=1).astype(np.int16)
    count = np.round(draw.permutation(shares) * _SCALE).astype(np.int64)
    likelier = np.round(count * statistics["first_choice"]).astype(np.int64)
    first = np.where(draw.random(len(count)) < 0.5, likelier, count - likelier)
    common = np.array(statistics["in_common"])
    return fit_chain(pairs, count, first, common / common.sum())
