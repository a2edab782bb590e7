"""SGLang: the recorder's dumps token by token, its counts, and responses."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.crisp.trace.engines.reading import counts, read, refusal, routing

torch = pytest.importorskip("torch")

EXTEND, DECODE, MIXED = 1, 2, 3
SIZES = {"n_experts": 16}


def padded(experts: np.ndarray) -> np.ndarray:
    """[tokens, layers, k] as a record has it: [layers, tokens, 8], -1 behind."""
    wide = np.full((*experts.shape[:2], 8), -1, np.int32)
    wide[..., : experts.shape[2]] = experts
    return wide.transpose(1, 0, 2)


def record(
    number: int, mode: int, positions: list[int], experts: np.ndarray, lengths: Any = None
) -> dict[str, Any]:
    return {
        "forward_pass_id": number,
        "rank": 0,
        "gatherer_key": "primary",
        "input_ids": [7] * len(positions),
        "positions": positions,
        "extend_seq_lens": lengths,
        "forward_mode": mode,
        "topk_ids_of_layer": torch.tensor(padded(experts)),
        "misc_objects": [],
    }


def dump(path: Path, records: list[dict[str, Any]], mapping: Any = None) -> Path:
    places = np.tile(np.arange(16), (3, 1)) if mapping is None else mapping
    torch.save({"records": records, "last_physical_to_logical_map": torch.tensor(places)}, path)
    return path


def test_batches_mix_sequences_and_are_taken_apart(tmp_path: Path) -> None:
    """Prompts of 3 and 2 tokens together, decode together; a third joins as the first ends."""
    ids = {name: routing(n, seed=n).experts for name, n in (("a", 5), ("b", 6), ("c", 4))}
    a, b, c = ids["a"], ids["b"], ids["c"]
    join = np.concatenate
    records = [
        record(0, EXTEND, [0, 1, 2, 0, 1], join([a[:3], b[:2]]), [3, 2]),
        record(1, DECODE, [3, 2], np.stack([a[3], b[2]])),
        record(2, DECODE, [4, 3], np.stack([a[4], b[3]])),
        record(3, EXTEND, [0, 1], c[:2], [2]),  # a prompt in chunks
        record(4, EXTEND, [2], c[2:3], [1]),
        record(5, DECODE, [4, 3], np.stack([b[4], c[3]])),  # a is done; c has position 3 as b had
        record(6, DECODE, [5], b[5:6]),
    ]
    log = read(dump(tmp_path / "d.pt", records), "sglang", **SIZES)
    trace = log.trace
    assert trace.sequence.tolist() == [0] * 5 + [1] * 6 + [2] * 4
    np.testing.assert_array_equal(trace.experts, join([a, b, c]))
    assert trace.phase.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1]
    assert trace.header.top_k == 2
    assert log.notes == ()


def test_equal_positions_go_by_the_order_of_the_batch(tmp_path: Path) -> None:
    a, b = routing(3, seed=1).experts, routing(3, seed=2).experts
    records = [
        record(0, EXTEND, [0, 1, 0, 1], np.concatenate([a[:2], b[:2]]), [2, 2]),
        record(1, DECODE, [2, 2], np.stack([a[2], b[2]])),
    ]
    log = read(dump(tmp_path / "d.pt", records), "sglang", **SIZES)
    np.testing.assert_array_equal(log.trace.experts, np.concatenate([a, b]))
    assert log.notes == (
        "1 decode tokens could go on with several sequences: the batch's order decided",
    )


def test_without_lengths_prompts_are_runs_of_positions(tmp_path: Path) -> None:
    a, b = routing(3, seed=1).experts, routing(2, seed=2).experts
    one = record(0, EXTEND, [5, 6, 7, 0, 1], np.concatenate([a, b]))  # a has a cached prefix
    trace = read(dump(tmp_path / "d.pt", [one]), "sglang", **SIZES).trace
    assert trace.sequence.tolist() == [0, 0, 0, 1, 1]
    assert trace.position.tolist() == [5, 6, 7, 0, 1]


def test_decode_tokens_within_a_mixed_pass(tmp_path: Path) -> None:
    a, b = routing(3, seed=1).experts, routing(2, seed=2).experts
    records = [
        record(0, EXTEND, [0, 1], a[:2], [2]),
        record(1, MIXED, [0, 1, 2], np.concatenate([b, a[2:]]), [2, 1]),
    ]
    trace = read(dump(tmp_path / "d.pt", records), "sglang", **SIZES).trace
    np.testing.assert_array_equal(trace.experts, np.concatenate([a, b]))
    assert trace.phase.tolist() == [0, 0, 1, 0, 0]


def test_padding_of_batches_is_left_out(tmp_path: Path) -> None:
    a = routing(3).experts
    none = np.full((1, 3, 2), -1)
    records = [
        record(0, EXTEND, [0, 1], a[:2], [2]),
        record(1, DECODE, [2, 0, 0], np.concatenate([a[2:], none, none])),
    ]
    log = read(dump(tmp_path / "d.pt", records), "sglang", **SIZES)
    np.testing.assert_array_equal(log.trace.experts, a)
    assert log.left_out == 2
    assert log.notes == ("2 places of decode batches without any expert (padding): left out",)


def test_physical_experts_are_mapped_back(tmp_path: Path) -> None:
    """Twenty places of sixteen experts, other ones in each layer."""
    random = np.random.default_rng(3)
    places = np.stack([random.permutation(np.r_[np.arange(16), :4]) for _ in range(3)])
    experts = routing(4).experts
    physical = np.empty_like(experts)
    for layer in range(3):
        for at, expert in np.ndenumerate(experts[:, layer]):
            physical[at[0], layer, at[1]] = random.choice(np.flatnonzero(places[layer] == expert))
    one = record(0, EXTEND, [0, 1, 2, 3], physical, [4])
    trace = read(dump(tmp_path / "d.pt", [one], places), "sglang", **SIZES).trace
    np.testing.assert_array_equal(trace.experts, experts)


def test_ranks_that_log_the_same_or_their_own(tmp_path: Path) -> None:
    a, b = routing(3, seed=1).experts, routing(2, seed=2).experts
    first = dump(tmp_path / "0.pt", [record(0, EXTEND, [0, 1, 2], a, [3])])
    same = dump(tmp_path / "1.pt", [record(0, EXTEND, [0, 1, 2], a, [3])])
    other = dump(tmp_path / "2.pt", [record(0, EXTEND, [0, 1], b, [2])])
    log = read([first, same], "sglang", **SIZES)
    assert log.trace.rows == 3
    assert log.notes == ("1 records of several ranks are the same: each counted once",)
    log = read([first, other], "sglang", **SIZES)
    np.testing.assert_array_equal(log.trace.experts, np.concatenate([a, b]))
    assert log.trace.sequence.tolist() == [0, 0, 0, 1, 1]


def test_dense_layers_are_minus_one(tmp_path: Path) -> None:
    experts = routing(3).experts
    experts[:, 0] = -1
    one = record(0, EXTEND, [0, 1, 2], experts, [3])
    trace = read(dump(tmp_path / "d.pt", [one]), "sglang", **SIZES).trace
    assert trace.moe_layers == (1, 2)


def test_counts(tmp_path: Path) -> None:
    logical = torch.arange(24).reshape(2, 3, 4)
    torch.save({"rank": 0, "logical_count": logical}, tmp_path / "s.pt")
    found = counts(tmp_path / "s.pt", "sglang").counts
    assert found.tolist() == [[12, 14, 16, 18], [20, 22, 24, 26], [28, 30, 32, 34]]
    physical = {"global_physical_count": torch.tensor([[1, 2, 3], [4, 5, 6]])}
    places = torch.tensor([[0, 1, 0], [1, 1, 0]])
    torch.save(
        {"records": [physical, physical], "last_physical_to_logical_map": places},
        tmp_path / "p.pt",
    )
    assert counts(tmp_path / "p.pt", "sglang").counts.tolist() == [[8, 4], [12, 18]]
    torch.save({"logical_count": torch.zeros(2, 3, 4, dtype=torch.int32)}, tmp_path / "s.pt")
    assert "counts nothing" in refusal(tmp_path / "s.pt", "sglang")


def test_what_is_refused(tmp_path: Path) -> None:
    experts = routing(3).experts
    good = record(0, EXTEND, [0, 1, 2], experts, [3])

    def said(change: dict[str, Any], mapping: Any = None) -> str:
        return refusal(dump(tmp_path / "d.pt", [good | change], mapping), "sglang")

    assert "FILE: record 0: 2 positions, routing of 3 tokens" in said({"positions": [0, 1]})
    assert "forward_mode 5 (drafts" in said({"forward_mode": 5})
    assert "extend_seq_lens sum to 9, of 3 tokens" in said({"extend_seq_lens": [9]})
    assert "topk_ids_of_layer: [3] found" in said({"topk_ids_of_layer": torch.zeros(3)})
    assert "map has 2 places" in said({}, np.zeros((3, 2), int))
    assert "last_physical_to_logical_map of 2" in said({}, np.zeros((2, 16), int))
    assert "expected whole numbers" in said({"positions": ["a", "b", "c"]})
    assert "FILE: holds no records" in refusal(dump(tmp_path / "d.pt", []), "sglang")
    torch.save({"x": 2}, tmp_path / "d.pt")
    assert "not a dump" in refusal(tmp_path / "d.pt", "sglang")


def response(experts: np.ndarray, prompt: int, **changes: Any) -> dict[str, Any]:
    info = {
        "prompt_tokens": prompt,
        "completion_tokens": len(experts) + 1 - prompt,
        "routed_experts": base64.b64encode(experts.astype("<i4").tobytes()).decode(),
    }
    return {"text": "x", "meta_info": info | changes}


def test_responses(tmp_path: Path) -> None:
    """The bytes have no shape: it follows from the tokens and the layers, or k."""
    a, b = routing(5, seed=1).experts, routing(4, seed=2).experts
    path = tmp_path / "r.json"
    path.write_text(json.dumps([response(a, 3), response(b, 2)]))
    for known in ({"n_layers": 3}, {"top_k": 2}):
        trace = read(path, "sglang", **SIZES, **known).trace
        np.testing.assert_array_equal(trace.experts, np.concatenate([a, b]))
        assert trace.phase.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert "--model does, or crisp trace import --layers" in refusal(path)
    assert "are not a multiple of 5 layers" in refusal(path, n_layers=5)
    path.write_text(json.dumps(response(a, 3, completion_tokens=9)))
    assert "routed_experts are 120 bytes; expected a multiple of 4" in refusal(path, n_layers=3)
    path.write_text(json.dumps(response(a, 3, routed_experts="%")))
    assert "not base64" in refusal(path, n_layers=3)
