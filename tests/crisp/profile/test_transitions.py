"""What usually follows a combination, against plain counting."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from crisp.profile import Profile, Transitions
from crisp.trace import Header, RoutingTrace
from tests.oracles import offline
from tests.oracles.caches import usual_next


def trace_of(experts: np.ndarray, n_experts: int, ordered: bool) -> RoutingTrace:
    rows = len(experts)
    return RoutingTrace(
        experts=experts.astype(np.int16),
        sequence=np.zeros(rows, np.int32),
        position=np.arange(rows, dtype=np.int32),
        phase=np.ones(rows, np.uint8),
        header=Header(
            n_experts=n_experts, top_k=experts.shape[2], ordered=ordered, origin="synthetic"
        ),
    )


def following(trace: RoutingTrace) -> Transitions:
    return Transitions.from_trace(trace, Profile.from_trace(trace).expert_counts)


def test_by_hand() -> None:
    # (0, 1) is followed by 2 twice, by 1 and 3 once; (0, 2) by 0 and 1
    first = [[0, 1], [1, 0], [2, 0]]
    then = [[2, 3], [1, 2], [0, 1]]
    found = following(trace_of(np.stack([first, then], axis=1), 4, ordered=True))
    asked = np.array([[0, 1], [1, 0], [0, 2], [3, 1], [-1, -1]], np.int16)
    assert found.guess(0, asked).tolist() == [[2, 1], [2, 1], [0, 1], [-1, -1], [-1, -1]]


@given(st.integers(0, 10_000), st.integers(1, 3), st.booleans())
def test_equals_the_oracle(seed: int, k: int, ordered: bool) -> None:
    rng = np.random.default_rng(seed)
    experts = rng.random((40, 4, 5)).argsort(axis=2)[:, :, :k]
    experts[:, 1] = -1  # not MoE
    experts[rng.random(40) < 0.2, 2, -1] = -1
    found = following(trace_of(experts, 5, ordered))
    counts = None if ordered else offline.expert_counts(experts, 5).tolist()
    for layer, after in ((0, 2), (2, 3)):
        own = experts[:, layer]
        anchor = [offline.anchor_rank(row, counts and counts[layer]) for row in own.tolist()]
        usual = usual_next(experts, layer, after, anchor)
        guess = found.guess(layer, own.astype(np.int16))
        for row, rank, guessed in zip(own.tolist(), anchor, guess.tolist(), strict=True):
            expected: list[int] = []
            if rank is not None:
                others = [e for e in row if e >= 0 and e != row[rank]]
                i, j = sorted((row[rank], others[0] if others else row[rank]))
                expected = usual[i, j]
            assert [e for e in guessed if e >= 0] == expected
