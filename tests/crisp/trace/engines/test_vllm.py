"""vLLM: responses with routed experts as lists and as base64, its load statistics."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.crisp.trace.engines.reading import counts, read, refusal, routing

SIZES = {"n_experts": 16}


def encoded(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def write(path: Path, *responses: Any) -> Path:
    path.write_text("\n".join(json.dumps(response) for response in responses))
    return path


def test_lists_of_the_prompt_and_of_each_choice(tmp_path: Path) -> None:
    prompt, first, second = (routing(n, seed=n).experts for n in (4, 3, 2))
    path = write(
        tmp_path / "r.json",
        {
            "usage": {"prompt_tokens": 4, "completion_tokens": 7},
            "prompt_routed_experts": prompt.tolist(),
            "choices": [
                {"index": 0, "routed_experts": first.tolist()},
                {"index": 1, "routed_experts": second.tolist()},
            ],
        },
    )
    trace = read(path, "vllm", **SIZES).trace
    assert trace.sequence.tolist() == [0] * 7 + [1] * 6
    assert trace.position.tolist() == [*range(7), *range(6)]
    assert trace.phase.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    expected = np.concatenate([prompt, first, prompt, second])
    np.testing.assert_array_equal(trace.experts, expected)
    assert trace.header.ordered
    assert trace.weights is None


def test_base64_of_prompt_and_new_tokens_but_the_last(tmp_path: Path) -> None:
    experts = routing(6).experts
    response = {
        "usage": {"prompt_tokens": 4, "completion_tokens": 3},
        "choices": [{"index": 0, "routed_experts": encoded(experts.astype(np.uint8))}],
    }
    trace = read(write(tmp_path / "r.json", response), "vllm", **SIZES).trace
    np.testing.assert_array_equal(trace.experts, experts)
    assert trace.phase.tolist() == [0, 0, 0, 0, 1, 1]
    # The same, a response a line, and as the batch API wraps it.
    lines = write(tmp_path / "r.jsonl", response, {"response": {"body": response}})
    several = read(lines, "vllm", **SIZES).trace
    assert several.sequence.tolist() == [0] * 6 + [1] * 6
    assert several.select(several.sequence == 0).digest() == trace.digest()
    # A list of responses, new tokens only: the array has too few rows for the prompt.
    response["choices"] = [{"routed_experts": experts[4:].tolist()}]
    new = read(write(tmp_path / "n.json", [response]), "vllm", **SIZES).trace
    assert (new.position.tolist(), new.phase.tolist()) == ([4, 5], [1, 1])


def test_zeros_and_minus_ones_are_no_routing(tmp_path: Path) -> None:
    """Layer 0 is dense (never written), a cached prefix is -1, row 5 was not captured."""
    experts = routing(8).experts
    experts[:, 0] = 0
    experts[:3] = -1
    experts[5] = 0
    experts[6, 2] = 0  # one layer of one row
    path = write(
        tmp_path / "r.json",
        {
            "usage": {"prompt_tokens": 5, "completion_tokens": 4},
            "choices": [{"routed_experts": encoded(experts)}],
        },
    )
    log = read(path, "vllm", **SIZES)
    trace = log.trace
    assert (log.left_out, log.absent) == (4, 1)
    assert trace.moe_layers == (1, 2)
    assert trace.position.tolist() == [3, 4, 6, 7]
    assert trace.sequence.tolist() == [0, 0, 1, 1]  # after the row that is missing
    assert trace.experts[2].tolist() == [[-1, -1], experts[6, 1].tolist(), [-1, -1]]
    np.testing.assert_array_equal(trace.experts[3, 1:], experts[7, 1:])
    assert log.notes == (
        "1 rows of equal ids in all layers: the engine did not capture them",
        "4 rows without any expert (padding, or not captured): left out",
        "tokens are missing inside sequences: 1 new sequences begun",
        "1 of 4 rows lack 1 MoE layer: no expert is run there",
    )


def test_without_usage_all_is_decode_and_that_is_said(tmp_path: Path) -> None:
    experts = routing(3).experts
    path = write(tmp_path / "r.json", {"choices": [{"routed_experts": experts.tolist()}]})
    log = read(path, "vllm", **SIZES)
    assert log.trace.phase.tolist() == [1, 1, 1]
    assert log.notes == ("no phases: all taken as decode",)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ({"choices": [{"routed_experts": "!"}]}, "FILE: choice 0: routed_experts: not base64"),
        (
            {"choices": [{"routed_experts": base64.b64encode(b"12345678").decode()}]},
            "FILE: choice 0: routed_experts: not a .npy array",
        ),
        ({"choices": [{"routed_experts": [[1, 2]]}]}, "routed_experts: [1, 2] found; expected 3"),
        ({"choices": [{"routed_experts": [[[1, 2], [3]]]}]}, "its lists differ in length"),
        ({"choices": [{"routed_experts": [[["a", "b"]]]}]}, "expected whole numbers"),
        ({"choices": [{"routed_experts": [[[0.5, 1]]]}]}, "a number is not whole"),
        ({"choices": [{"routed_experts": [[[10**30, 1]]]}]}, "expected whole numbers"),
        ({"choices": [{"routed_experts": [[[16, 1]]]}]}, "expert 16 found; expected 0 to 15"),
        ({"choices": [{"routed_experts": [[[3, 1, 3]]]}]}, "experts [3, 1, 3]; one of them twice"),
        ({"choices": 3, "prompt_routed_experts": []}, "FILE: has no list 'choices'"),
        (
            {
                "usage": {"prompt_tokens": 9, "completion_tokens": 2},
                "choices": [{"routed_experts": [[[1, 2]]] * 4}],
            },
            "has 4 rows; expected 10, of 9 prompt and 2 new tokens but the last",
        ),
        ({"choices": [{"text": "x"}]}, "FILE: has no routed experts"),
    ],
)
def test_what_is_refused(tmp_path: Path, response: Any, message: str) -> None:
    assert message in refusal(write(tmp_path / "r.json", response), "vllm")


def test_lying_arrays_are_refused_before_they_are_read(tmp_path: Path) -> None:
    data = bytearray(base64.b64decode(encoded(np.zeros((2, 3, 2), np.int16))))
    lie = data.replace(b"(2, 3, 2), }      ", b"(2, 3, 2000000), }", 1)
    text = base64.b64encode(bytes(lie)).decode()
    path = write(tmp_path / "r.json", {"choices": [{"routed_experts": text}]})
    assert "need 24,000,000 bytes, 24 are there" in refusal(path, "vllm")
    objects = io.BytesIO()
    np.save(objects, np.array([print], object), allow_pickle=True)
    text = base64.b64encode(objects.getvalue()).decode()
    path = write(tmp_path / "r.json", {"choices": [{"routed_experts": text}]})
    assert "holds object; numbers were expected" in refusal(path, "vllm")
    (tmp_path / "r.json").write_text('{"choices": ' + "[" * 100_000)
    assert "FILE: not JSON" in refusal(tmp_path / "r.json", "vllm")


def test_the_number_of_experts_has_to_be_known(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", {"choices": [{"routed_experts": [[[1, 2]]]}]})
    assert refusal(path, n_experts=None) == (
        "FILE: does not say how many experts a layer has; --model does, or crisp trace import "
        "--experts"
    )


def test_load_statistics_are_counts_of_logical_experts(tmp_path: Path) -> None:
    """Two layers in four places of three experts: expert 1 of layer 0 is there twice."""
    records = [
        {
            "record_type": "eplb_load_stats",
            "step": step,
            "expert_load": [[1, 2, 3, 4], [5, 6, 7, 8]],
            "p2l_map": [[0, 1, 2, 1], [2, 1, 0, -1]],
        }
        for step in range(2)
    ]
    meta = {"record_type": "eplb_meta", "num_ranks": 2}
    found = counts(write(tmp_path / "s.jsonl", meta, *records), "vllm")
    assert found.counts.tolist() == [[2, 12, 6], [14, 12, 10]]
    assert "data-parallel size" in found.notes[0]
    del records[0]["p2l_map"], records[1]["p2l_map"]  # no places: experts themselves
    found = counts(write(tmp_path / "s.jsonl", *records), "vllm")
    assert found.counts.tolist() == [[2, 4, 6, 8], [10, 12, 14, 16]]


@pytest.mark.parametrize(
    ("load", "mapping", "message"),
    [
        ([[1, -2]], None, "a load is negative"),
        ([[1, "x"]], None, "expected a list of loads"),
        ([[1, 2]], [[0]], "expert_load is [1, 2], p2l_map [1, 1]"),
        ([[1, 2]], [[0, 2_000_000_000]], "p2l_map has expert 2000000000"),
    ],
)
def test_load_statistics_that_are_refused(
    tmp_path: Path, load: Any, mapping: Any, message: str
) -> None:
    record = {"record_type": "eplb_load_stats", "expert_load": load, "p2l_map": mapping}
    assert message in refusal(write(tmp_path / "s.jsonl", record))
