from __future__ import annotations

import numpy as np
import pytest

from crisp.diagnose.calls import Calls
from crisp.errors import CrispError
from tests.crisp.diagnose.test_replay import E, trace_of

PROMPT = [[[3, 1], []], [[1, 2], [4, 0]]]  # the last layer is evaluated for the last token only
DECODED = [[[2, 3], [0, 1]]]


def test_a_prompt_is_one_call_a_layer() -> None:
    calls = Calls.from_trace(trace_of(PROMPT, DECODED, (8, 9)), (8, 9))
    assert calls.entries == ((3, 1, 2), (E + 4, E + 0), (2, 3), (E + 0, E + 1))
    assert calls.last_used == ((3, 1, 2), (E + 4, E + 0), (2, 3), (E + 0, E + 1))
    assert calls.row.tolist() == [0, 1, 0, 1] and calls.token.tolist() == [-1, -1, 0, 0]
    assert calls.size == (8, 9) and calls.total_bytes == 17 * E and calls.tokens == 1


def test_other_lookups() -> None:
    trace = trace_of(PROMPT, DECODED, (9, 9))
    rows = Calls.from_trace(trace, (9, 9), lookups="row")
    assert rows.entries[0] == (3, 1, 1, 2)
    tensors = Calls.from_trace(trace, (9, 9), lookups="tensor")
    assert tensors.entries[0] == (9, 3, 6, 10, 4, 7, 11, 5, 8)
    assert tensors.size == (3, 3) and tensors.total_bytes == 18 * E
    single = Calls.from_trace(trace, (9, 9), prompts="by token")
    assert single.entries[:3] == ((3, 1), (1, 2), (E + 4, E + 0))
    assert single.token.tolist() == [-1, -1, -1, 0, 0]


def test_sequences_follow_one_another() -> None:
    first = trace_of(PROMPT, DECODED, (8, 9))
    tokens = np.array([0, 1, 0], np.int32)
    trace = type(first)(
        experts=first.experts, sequence=np.array([0, 0, 1], np.int32), position=tokens,
        phase=np.array([0, 1, 1], np.uint8), header=first.header,
    )  # fmt: skip
    calls = Calls.from_trace(trace, (8, 9))
    assert calls.token.tolist() == [-1, 0, 0, 1, 1]


def test_an_expert_without_a_size() -> None:
    with pytest.raises(CrispError, match="layer 1: its experts have 0 bytes"):
        Calls.from_trace(trace_of(PROMPT, DECODED, (8, 9)), (8, 0))
