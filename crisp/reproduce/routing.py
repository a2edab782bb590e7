"""The routing that claims are tried on: drawn from statistics of a real Mixtral, or given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from crisp.errors import CrispError
from crisp.reproduce.claims import printed
from crisp.reproduce.measured import routing
from crisp.trace import DECODE, PREFILL, RoutingTrace
from crisp.trace.chains import PairChain, fit_chain
from crisp.trace.describe import percent_of
from crisp.trace.synth import synthesize

ROWS, SEQUENCES, SEED = 4800, 24, 0  # half of them are counted, the others run
GENERATED = 128  # tokens after a prompt
LENGTHS = (128, 512, 1024, 2048)  # of a prompt, as in Figure 17
_SCALE = 10**6  # shares become counts


def drawn(
    progress: Callable[[float], None] = lambda share: None, *, skewed: bool = False
) -> RoutingTrace:
    """A trace of Mixtral-8x7B's 32 layers that has its mean statistics in every layer.

    How unequal pairs are, and how many experts a token has in common with the one before, are the
    real model's means over layers; which pairs are the frequent ones is drawn. A cache lives on the
    first two: it loads within 3 % of what it loads where every layer has its own statistics.

    skewed: pairs are as unequal as in the paper's Figure 3 instead (`figure3_shares`).
    """
    known = routing()
    note = f"drawn from {known['source']}"
    if skewed:
        known = {**known, "pair_shares": figure3_shares(known["pair_shares"])}
        note += "; pairs as unequal as in the paper's Figure 3"
    draw = np.random.default_rng(SEED)
    chains = {layer: _chain(known, draw) for layer in range(known["layers"])}
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
    """Shares of the pairs, falling, made as unequal as Figure 3 has them.

    The most frequent 25 % take what it prints at least, the least frequent 29 % what it prints at
    most, the others the rest; within each of the three, shares keep their proportions.
    """
    n = len(shares)
    top, bottom = printed("F3.top25") / 100, printed("F3.bottom29") / 100
    ends = [0, percent_of(25, n), n - percent_of(29, n), n]
    found: list[float] = []
    for start, end, taken in zip(ends, ends[1:], (top, 1 - top - bottom, bottom), strict=False):
        own = shares[start:end]
        found += [share * taken / sum(own) for share in own]
    return sorted(found, reverse=True)


def prompted(trace: RoutingTrace, length: int) -> RoutingTrace:
    """The first rows of a trace as one sequence: a prompt, then ``GENERATED`` decoded tokens.

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


def _chain(known: dict[str, Any], draw: np.random.Generator) -> PairChain:
    """One layer: the shares, dealt to the pairs at random."""
    shares = np.array(known["pair_shares"])
    n = round((1 + np.sqrt(1 + 8 * len(shares))) / 2)
    pairs = np.stack(np.triu_indices(n, 1), axis=1).astype(np.int16)
    count = np.round(draw.permutation(shares) * _SCALE).astype(np.int64)
    likelier = np.round(count * known["first_choice"]).astype(np.int64)
    first = np.where(draw.random(len(count)) < 0.5, likelier, count - likelier)
    common = np.array(known["in_common"])
    return fit_chain(pairs, count, first, common / common.sum())
