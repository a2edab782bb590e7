"""Small runs drawn at random. Times are small whole numbers, so that many things happen at once."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

from crisp.policy import Cache
from tests.oracles.straight import KEYS
from tests.sim.toys import Costs, Toy

ORDERS = ("fifo", "widest", "narrowest", "resident-first", "johnson", "random")
CACHES = ("none", "static", "saliency", *KEYS)
PREFETCHES = ("none", "previous", "guess", "perfect")
SALIENT = ("saliency(previous)", "saliency(guess)", "saliency(perfect)")


@st.composite
def toys(
    draw: st.DrawFn,
    caches: Sequence[str] = CACHES,
    prefetches: Sequence[str] = (*PREFETCHES, *SALIENT),
) -> Toy:
    n_experts = draw(st.integers(1, 6))
    k = draw(st.integers(1, min(3, n_experts)))
    layers, rows = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    n_blocks = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    experts = rng.random((rows, layers, n_experts)).argsort(axis=2)[:, :, :k]
    guess = np.where(
        rng.random((rows, layers, k)) < 0.7,
        experts,
        rng.random((rows, layers, n_experts)).argsort(axis=2)[:, :, :k],
    )
    if layers > 1 and draw(st.booleans()):
        experts[:, draw(st.integers(0, layers - 1))] = -1
    if k > 1 and draw(st.booleans()):  # a token with fewer experts than k
        experts[0, :, -1] = -1
    widths = rng.integers(0, n_blocks + 1, experts.shape)
    sequence = np.sort(rng.integers(0, draw(st.integers(1, 3)), rows))
    starts = np.searchsorted(sequence, sequence)
    prompt = rng.integers(0, 3, rows)[starts] if draw(st.booleans()) else 0
    sequential = draw(st.booleans())
    cache = draw(st.sampled_from(caches))
    costs = Costs(
        request=draw(st.integers(0, 3)),
        load_block=draw(st.integers(1, 5)),
        launch=draw(st.integers(1, 3)),
        compute_block=draw(st.integers(1, 4)),
        row_block=draw(st.integers(0, 1)),
        router=draw(st.integers(0, 6)),
        row=draw(st.integers(0, 1)),
    )
    return Toy(
        experts, widths, n_experts, n_blocks, sequence,
        phase=(np.arange(rows) - starts >= prompt).astype(int),
        guess=guess,
        order="sequential" if sequential else draw(st.sampled_from(ORDERS)),
        cache=cache,
        share=Fraction(draw(st.integers(1, 10)), 10),
        scope=draw(st.sampled_from(["layer", "global"])),
        unit="block" if Cache(cache, unit="block").rule.needs_blocks
        else draw(st.sampled_from(["expert", "block"])),
        granularity=draw(st.sampled_from(["expert", "block"])),
        prefetch="none" if sequential else draw(st.sampled_from(prefetches)),
        batch=draw(st.integers(1, 3)), chunk=draw(st.integers(1, 4)),
        costs=costs, tabled=draw(st.booleans()),
        pages=draw(st.none() | st.tuples(*[st.integers(1, 5)] * 3)),
        weights=rng.integers(0, 4, experts.shape) / 4,
    )  # fmt: skip
