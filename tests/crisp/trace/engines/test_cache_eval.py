"""moe-cache-eval: events of a layer call, and the CSV of events."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.crisp.trace.engines.reading import read, refusal, routing


def events(experts: np.ndarray, weights: np.ndarray, prompts: list[int]) -> dict[str, np.ndarray]:
    """The tensors of one request's passes of so many rows."""
    columns: dict[str, list[Any]] = {}
    start = 0

    def add(**values: Any) -> None:
        for name, value in values.items():
            columns.setdefault(name, []).append(value)

    lengths = [0]
    for step, rows in enumerate(prompts):
        for layer in range(experts.shape[1]):
            some = experts[start : start + rows, layer]
            gates = weights[start : start + rows, layer]
            ids, counts = np.unique(some, return_counts=True)
            add(request_indices=3, scheduler_steps=step, forward_cycles=step, layer_ids=layer)
            add(phases=int(rows == 1), token_counts=rows)
            lengths.append(len(ids))
            for expert, count in zip(ids, counts, strict=True):
                add(expert_ids=expert, assignment_counts=count)
                add(gate_mass=gates[some == expert].sum())
        start += rows
    tensors = {name: np.array(column, np.int32) for name, column in columns.items()}
    tensors["gate_mass"] = np.array(columns["gate_mass"], np.float32)
    tensors["offsets"] = np.cumsum(lengths).astype(np.int64)
    return tensors


def save(folder: Path, tensors: dict[str, np.ndarray], **manifest: Any) -> Path:
    path = folder / "events.safetensors"
    save_file(tensors, path)
    model = {"num_layers": 3, "num_experts": 16}
    (folder / "manifest.json").write_text(json.dumps({"model": model} | manifest))
    return path


def test_decode_tokens_are_exact(tmp_path: Path) -> None:
    experts, weights = routing()
    path = save(tmp_path, events(experts, weights, [1] * 7))
    trace = read(path, "moe-cache-eval").trace
    np.testing.assert_array_equal(trace.experts, experts)  # by gate mass: the log has them by id
    np.testing.assert_array_equal(trace.weights, weights.astype(np.float16))
    assert trace.phase.tolist() == [1] * 7
    again = read(tmp_path / "manifest.json", "moe-cache-eval").trace
    assert again.digest() == trace.digest()


def test_events_of_several_tokens_keep_their_experts_and_counts(tmp_path: Path) -> None:
    experts, weights = routing(9, n_experts=6, k=3)
    path = save(tmp_path, events(experts, weights, [6, 1, 1, 1]))
    log = read(path, "moe-cache-eval")
    for layer in range(3):
        for expert in range(6):
            of_log = (log.trace.experts[:6, layer] == expert).sum()
            assert of_log == (experts[:6, layer] == expert).sum()
    np.testing.assert_array_equal(log.trace.experts[6:], experts[6:])
    assert log.trace.phase.tolist() == [0] * 6 + [1] * 3
    assert log.notes[0].startswith("3 events of several tokens: which token used which")


def test_a_layer_with_fewer_tokens_has_the_last(tmp_path: Path) -> None:
    experts, weights = routing(4, layers=1)
    tensors = events(experts, weights, [4])
    last = events(experts[3:], weights[3:], [1])
    last["layer_ids"] += 1
    both = {
        name: np.concatenate([array, last[name]])
        for name, array in tensors.items()
        if name != "offsets"
    }
    both["offsets"] = np.append(tensors["offsets"], tensors["offsets"][-1] + last["offsets"][1:])
    log = read(save(tmp_path, both), "moe-cache-eval")
    assert (log.trace.experts[:, 1, 0] >= 0).tolist() == [False, False, False, True]


def test_the_manifest_belongs_to_the_events(tmp_path: Path) -> None:
    path = save(tmp_path, events(*routing(), [1] * 7))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    model = {"num_layers": 3, "num_experts": 16}
    manifest = {"model": model, "artifacts": {"events": {"path": "events", "sha256": digest}}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert read(path, "moe-cache-eval").trace.rows == 7
    manifest["artifacts"] = {"events": {"sha256": "0" * 64}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert "is not the file that manifest.json beside it is of" in refusal(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("offsets", lambda x: x[:-1], "differ in length"),
        ("offsets", lambda x: x[::-1].copy(), "offsets do not rise"),
        ("token_counts", lambda x: x * 1_000_000_000, "too many tokens"),
        ("token_counts", lambda x: x * 0, "out of range"),
        ("assignment_counts", lambda x: x * 5, "event 0: 10 assignments of 1 tokens"),
        ("layer_ids", lambda x: x + 30_000, "out of range"),
        ("phases", lambda x: x + 5, "a phase other than 0 and 1"),
        ("expert_ids", lambda x: x + 100, "expected 0 to 15"),
        ("gate_mass", lambda x: -x, "expected a finite number, not negative"),
        ("expert_ids", lambda x: x.astype(np.float32), "expert_ids is float32"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, value: Any, message: str) -> None:
    tensors = events(*routing(), [1] * 7)
    tensors[name] = value(tensors[name])
    assert message in refusal(save(tmp_path, tensors), "moe-cache-eval")


def test_files_that_are_cut_off(tmp_path: Path) -> None:
    path = save(tmp_path, events(*routing(), [1] * 7))
    path.write_bytes(path.read_bytes()[:-5])
    assert "not a whole safetensors file" in refusal(path, "moe-cache-eval")
    tensors = events(*routing(), [1] * 7)
    del tensors["phases"]
    assert "lacks the tensor 'phases'" in refusal(save(tmp_path, tensors), "moe-cache-eval")


def test_a_csv_of_events(tmp_path: Path) -> None:
    (tmp_path / "events.csv").write_text(
        "event_index,scheduler_step,layer,requested_experts,misses,hits\n"
        "0,0,0,0 1,2,0\n1,0,1,2 3,2,0\n2,1,0,1 3,1,1\n3,1,1,0,1,0\n"
    )
    log = read(tmp_path / "events.csv", "moe-cache-eval", n_experts=4)
    assert log.trace.experts.tolist() == [[[0, 1], [2, 3]], [[1, 3], [0, -1]]]
    assert not log.trace.header.ordered
    (tmp_path / "events.csv").write_text(
        "event_index,scheduler_step,layer,requested_experts\n0,0,0,0 x\n"
    )
    assert "line 2: experts '0 x'" in refusal(tmp_path / "events.csv")
