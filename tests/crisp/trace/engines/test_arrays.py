"""Arrays [tokens, layers, k] in .npy, .npz and .pt, counts and router logits."""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.crisp.trace.engines.reading import counts, read, refusal, routing

SIZES = {"n_experts": 16}


def test_npy(tmp_path: Path) -> None:
    experts = routing().experts
    np.save(tmp_path / "a.npy", experts.astype(np.int16))
    np.save(tmp_path / "b.npy", np.asfortranarray(experts.astype(np.uint8)))
    log = read(tmp_path / "a.npy", "array", **SIZES)
    np.testing.assert_array_equal(log.trace.experts, experts)
    assert log.trace.phase.tolist() == [1] * 7
    assert log.notes == ("no phases: all taken as decode",)
    both = read([tmp_path / "a.npy", tmp_path / "b.npy"], "array", **SIZES).trace
    assert both.sequence.tolist() == [0] * 7 + [1] * 7
    np.testing.assert_array_equal(both.experts, np.concatenate([experts, experts]))


def test_npz_with_a_prompt(tmp_path: Path) -> None:
    experts = routing().experts
    np.savez_compressed(
        tmp_path / "a.npz", prompt_routed_experts=experts[:4], routed_experts=experts[4:]
    )
    trace = read(tmp_path / "a.npz", "array", **SIZES).trace
    np.testing.assert_array_equal(trace.experts, experts)
    assert trace.phase.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_pt(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    experts = routing().experts
    torch.save(torch.tensor(experts), tmp_path / "a.pt")
    torch.save({"x": torch.tensor(experts), "y": torch.tensor(experts[:2])}, tmp_path / "b.pt")
    trace = read(tmp_path / "a.pt", "array", **SIZES).trace
    np.testing.assert_array_equal(trace.experts, experts)
    trace = read(tmp_path / "b.pt", "array", **SIZES).trace
    assert trace.sequence.tolist() == [0] * 7 + [1] * 2


class Attack:
    """An object whose unpickling would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_pickles_are_never_run(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    trap = tmp_path / "trap"
    torch.save({"records": [Attack(trap)]}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Attack(trap), protocol=2))
    np.save(tmp_path / "c.npy", np.array([Attack(trap)], object), allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.write(tmp_path / "c.npy", "x.npy")
    for name in ("a.pt", "b.pt", "c.npy", "d.npz"):
        for engine in ("array", "sglang", "router-logits", "moe-infinity", "vllm"):
            assert refusal(tmp_path / name, engine).startswith("FILE")
        assert re.search("nothing of it was run|numbers were expected", refusal(tmp_path / name))
    assert not trap.exists()


def test_files_that_lie_or_are_cut_off(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", routing().experts)
    whole = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(whole[:-8])
    assert "need 336 bytes, 328 are there" in refusal(tmp_path / "a.npy", "array")
    (tmp_path / "a.npy").write_bytes(whole[:20])
    assert "FILE: not a .npy array" in refusal(tmp_path / "a.npy", "array")
    huge = whole.replace(b"(7, 3, 2), }                ", b"(7, 3, 99999999999999999), }")
    assert len(huge) == len(whole)
    (tmp_path / "a.npy").write_bytes(huge)
    assert "bytes, 336 are there" in refusal(tmp_path / "a.npy", "array")
    np.savez_compressed(tmp_path / "b.npz", x=np.zeros((1 << 20, 8, 8), np.int8))
    bomb = (tmp_path / "b.npz").read_bytes()
    (tmp_path / "b.npz").write_bytes(bomb[: len(bomb) // 2])
    assert "FILE: not a whole .npz file" in refusal(tmp_path / "b.npz", "array")
    torch = pytest.importorskip("torch")
    torch.save(torch.zeros(50, 3, 2), tmp_path / "c.pt")
    whole = (tmp_path / "c.pt").read_bytes()
    (tmp_path / "c.pt").write_bytes(whole[:-900])
    assert "FILE: not a whole .pt file" in refusal(tmp_path / "c.pt", "array")


def test_tensors_without_strides_are_as_large_as_their_shape(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    one = torch.zeros(1, 1, 1, dtype=torch.int32)
    torch.save(one.expand(1_000_000, 10_000, 8), tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size < 4096
    assert "640,000,000,000 bytes unpacked are more" in refusal(tmp_path / "a.pt", "array")
    torch.save([one.float().expand(1, 1_000_000, 100_000)], tmp_path / "a.pt")
    assert "bytes unpacked are more" in refusal(tmp_path / "a.pt", "router-logits", top_k=2)


def test_more_than_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may unpack to anything: what it says of itself is summed before it is read."""
    monkeypatch.setattr("crisp.trace.importing.engines.assembly.files._MOST", 1 << 20)
    np.savez_compressed(tmp_path / "b.npz", x=np.zeros((1 << 15, 8, 8), np.int8))
    assert (tmp_path / "b.npz").stat().st_size < 1 << 14
    assert "2,097,280 bytes unpacked are more" in refusal(tmp_path / "b.npz", "array")


def test_counts_of_sequences(tmp_path: Path) -> None:
    """[sequences, layers, experts]: ids would be distinct in a row."""
    matrix = np.zeros((3, 2, 8))
    matrix[:, 0, 1], matrix[0, 1, 5], matrix[1, 1, 7] = 4, 3, 5
    np.save(tmp_path / "t.npy", matrix)
    expected = [[0, 12, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 3, 0, 5]]
    assert counts(tmp_path / "t.npy", "moe-infinity").counts.tolist() == expected
    np.save(tmp_path / "t.npy", matrix.astype(np.int64))
    assert counts(tmp_path / "t.npy", "moe-infinity").counts.tolist() == expected
    np.save(tmp_path / "t.npy", -matrix)
    assert "negative" in refusal(tmp_path / "t.npy", "moe-infinity")
    np.save(tmp_path / "t.npy", matrix[0])
    assert "expected counts [sequences, layers, experts]" in refusal(
        tmp_path / "t.npy", "moe-infinity"
    )


def logits(tokens: int = 5, layers: int = 3, n_experts: int = 16) -> np.ndarray:
    random = np.random.default_rng(1)
    return random.normal(0, 3, (layers, tokens, n_experts)).astype(np.float16)


def test_router_logits_become_scores_and_their_largest_experts(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    given = logits()
    best = np.argsort(-given.astype(float), axis=2, kind="stable")[..., :4].transpose(1, 0, 2)
    torch.save(tuple(torch.tensor(layer) for layer in given), tmp_path / "l.pt")
    np.savez(tmp_path / "l.npz", **{f"layer_{n}": layer for n, layer in enumerate(given)})
    np.save(tmp_path / "l.npy", given)
    torch.save([torch.tensor(x, dtype=torch.bfloat16) for x in given], tmp_path / "b.pt")
    for name in ("l.pt", "l.npz", "l.npy"):
        log = read(tmp_path / name, "router-logits", top_k=4, n_layers=3)
        np.testing.assert_array_equal(log.trace.experts, best)
        assert log.trace.scores is not None
        np.testing.assert_array_equal(log.trace.scores, given.transpose(1, 0, 2))
    assert read(tmp_path / "b.pt", "router-logits", top_k=4).trace.header.n_experts == 16
    assert "experts a token is routed to; --model does, or crisp" in refusal(tmp_path / "l.pt")
    assert "top-17 of 16 experts" in refusal(tmp_path / "l.pt", top_k=17)
    assert "the layers first" in refusal(tmp_path / "l.npy", top_k=4)


def test_router_logits_of_a_batch_and_of_some_layers(tmp_path: Path) -> None:
    given = logits(tokens=6).reshape(3, 2, 3, 16)  # two sequences of three tokens
    np.savez(tmp_path / "l.npz", l1=given[0], l2=given[1], l4=given[2])
    trace = read(tmp_path / "l.npz", "router-logits", top_k=2).trace
    assert trace.sequence.tolist() == [0, 0, 0, 1, 1, 1]
    assert trace.position.tolist() == [0, 1, 2, 0, 1, 2]
    assert trace.moe_layers == (1, 2, 4)
    given[0, 0, 0, 3] = np.nan
    np.savez(tmp_path / "l.npz", l1=given[0], l2=given[1])
    assert "layer 1: a logit is not a finite number" in refusal(tmp_path / "l.npz", top_k=2)
    np.savez(tmp_path / "l.npz", l1=np.full((2, 16), 1e6))
    assert "layer 1: a logit is beyond float16" in refusal(tmp_path / "l.npz", top_k=2)
