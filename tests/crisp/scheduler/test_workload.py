"""Steps and tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.scheduler.workload import chosen_rows, plan, split
from crisp.trace import Header, RoutingTrace
from crisp.trace.fitting import fit_to_trace
from tests.oracles import straight


def trace(*prompts_and_answers: tuple[int, int], layers: int = 1) -> RoutingTrace:
    """A trace of sequences, each of some prompt rows and some decode rows."""
    lengths = [sum(pair) for pair in prompts_and_answers]
    rows = sum(lengths)
    phase = [p for pair in prompts_and_answers for p in [0] * pair[0] + [1] * pair[1]]
    return RoutingTrace(
        experts=np.tile(np.array([0, 1], np.int16), (rows, layers, 1)),
        sequence=np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
        position=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        phase=np.array(phase, np.uint8),
        header=Header(n_experts=8, top_k=2, ordered=True, origin="synthetic"),
    )


def steps(given: RoutingTrace, phase: str = "all", batch: int = 1, **options: Any) -> list[Any]:
    rows = chosen_rows(given, phase, options.pop("limit", None))
    return [list(step.rows) for step in plan(given, rows, batch, options.pop("chunk", 512))]


def test_a_free_slot_takes_the_next_sequence() -> None:
    """Rows 0-2, 3, 4-5: the second slot is free after one step and takes the third sequence."""
    assert steps(trace((0, 3), (0, 1), (0, 2)), batch=2) == [[0, 3], [1, 4], [2, 5]]


def test_a_prompt_runs_in_chunks_before_its_sequence_decodes() -> None:
    assert steps(trace((5, 1), (1, 1)), chunk=2) == [[0, 1], [2, 3], [4], [5], [6], [7]]
    assert steps(trace((2, 2), (1, 1)), batch=2) == [[0, 1], [4], [2, 5], [3]]
    assert steps(trace((600, 1), (2, 1)), chunk="whole") == [
        [*range(600)], [600], [601, 602], [603],
    ]  # fmt: skip


def test_phase_and_limit_choose_rows() -> None:
    two = trace((2, 2), (1, 2))
    assert steps(two, "decode") == [[2], [3], [5], [6]]
    assert steps(two, "decode", limit=3) == [[2], [3], [5]]
    assert steps(two, "prefill") == [[0, 1], [4]]
    with pytest.raises(CrispError, match="phase prefill: the trace has no such rows"):
        steps(trace((0, 2)), "prefill")


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_steps_equal_the_oracles(sizes: list[tuple[int, int]], batch: int, chunk: int) -> None:
    made = trace(*sizes)
    expected = straight.steps(made.sequence, made.phase, batch, chunk)
    assert steps(made, batch=batch, chunk=chunk) == expected


def test_first_and_last_chunks_are_marked() -> None:
    made = trace((5, 1))
    marks = [(s.phase, s.opens, s.closes) for s in plan(made, np.arange(6), 1, 2)]
    assert marks == [(0, True, False), (0, False, False), (0, False, True), (1, False, False)]


def test_the_split_is_by_sequences_or_rows() -> None:
    first, rest, how = split(trace((1, 1), (0, 4), (2, 0)))
    assert (first.rows, rest.rows) == (2, 6)
    assert "first 1 of the trace's 3 sequences" in how
    first, rest, how = split(trace((2, 3)))
    assert (first.rows, rest.rows) == (2, 3)
    with pytest.raises(CrispError, match="nothing to split"):
        split(trace((0, 1)))


def test_a_model_and_a_trace_must_fit() -> None:
    mixtral, gpt_oss = ModelSpec.named("mixtral-8x7b"), ModelSpec.named("gpt-oss-20b")
    spec = fit_to_trace(mixtral, trace((0, 2), layers=6))
    assert (spec.n_layers, spec.moe_layers) == (6, tuple(range(6)))
    for model, layers, top_k, message in (
        (gpt_oss, 6, None, "32 experts, but the trace has 8"),
        (mixtral, 33, None, "32 layers, but the trace has 33"),
        (mixtral, 6, 3, "top-3, but the trace was recorded with top-2"),
        (mixtral.with_(top_k=4), 6, None, "--top-k 2 simulates it as recorded"),
    ):
        with pytest.raises(CrispError, match=message):
            fit_to_trace(model, trace((0, 2), layers=layers), top_k)
    assert fit_to_trace(mixtral.with_(top_k=4), trace((0, 2)), 2).top_k == 2
