"""moe-policylang: JSON lines and parquet of its record_trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.crisp.trace.engines.reading import read, refusal, routing

HEADER = {
    "model_name": "m", "num_layers": 3, "num_experts": 16, "top_k": 2, "num_entries": 21,
    "records_full_softmax": False,
}  # fmt: skip


def entries(experts: np.ndarray, weights: np.ndarray, prompt: int = 3) -> list[dict[str, Any]]:
    return [
        {
            "p": 4, "t": t, "l": layer, "e": experts[t, layer].tolist(),
            "s": weights[t, layer].tolist(), "ph": "prefill" if t < prompt else "decode",
        }
        for t in range(len(experts))
        for layer in range(experts.shape[1])
    ]  # fmt: skip


def write(path: Path, header: dict[str, Any], lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))
    return path


def test_json_lines(tmp_path: Path) -> None:
    experts, weights = routing()
    path = write(tmp_path / "t.jsonl", HEADER, entries(experts, weights))
    log = read(path, "moe-policylang")
    np.testing.assert_array_equal(log.trace.experts, experts)
    np.testing.assert_array_equal(log.trace.weights, weights.astype(np.float16))
    assert log.trace.phase.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert (log.trace.header.n_experts, log.notes) == (16, ())


def test_parquet(tmp_path: Path) -> None:
    experts, weights = routing()
    names = {
        "p": "prompt_id", "t": "token_idx", "l": "layer_idx", "e": "selected_experts",
        "s": "router_scores", "ph": "phase",
    }  # fmt: skip
    frame = pd.DataFrame(entries(experts, weights)).rename(columns=names)
    frame.to_parquet(tmp_path / "t.parquet")
    trace = read(tmp_path / "t.parquet", "moe-policylang", n_experts=16).trace
    lines = write(tmp_path / "t.jsonl", HEADER, entries(experts, weights))
    assert trace.digest() == read(lines, "moe-policylang").trace.digest()
    frame = frame.drop(columns=["phase", "router_scores"])
    frame.to_parquet(tmp_path / "t.parquet")
    log = read(tmp_path / "t.parquet", "moe-policylang", n_experts=16)
    np.testing.assert_array_equal(log.trace.experts, experts)
    assert log.notes == ("no phases: all taken as decode",)
    frame.assign(token_idx=0.5).to_parquet(tmp_path / "t.parquet")
    assert "column token_idx has 0.5" in refusal(tmp_path / "t.parquet")


def test_a_full_softmax_becomes_scores(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(7, 3, 16))
    shares = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    experts = np.argsort(-shares, axis=2)[..., :2]
    lines = entries(experts, shares)
    path = write(tmp_path / "t.jsonl", HEADER | {"records_full_softmax": True}, lines)
    log = read(path, "moe-policylang")
    assert log.trace.weights is None
    assert log.trace.scores is not None
    np.testing.assert_allclose(log.trace.scores, np.log(shares), atol=0.01)
    assert log.notes == ("scores are logarithms of the recorded softmax",)


@pytest.mark.parametrize(
    ("header", "line", "message"),
    [
        ({"num_entries": 22}, {}, "promises 22 entries, 21 are there; the file may be cut off"),
        ({"num_layers": "x"}, {}, "has no whole number 'num_layers'"),
        ({"num_layers": 2}, {}, "layer 2 found; the model has 2 layers"),
        ({"num_experts": 4}, {}, "expected 0 to 3"),
        ({}, {"e": "x"}, "FILE: line 5: expected numbers p, t, l and lists e, s"),
        ({}, {"ph": "both"}, "FILE: line 5: phase 'both'"),
        ({}, {"s": []}, "20 of 21 lines have scores"),
        ({}, {"t": 0, "l": 0}, "sequence 0, position 0 has layer 0 twice"),
        ({}, {"s": [1e9, 1]}, "weight inf found"),
        ({}, {"t": 10**30}, "a prompt, token or layer is out of range"),
        ({}, {"e": [10**30, 1]}, "an expert is out of range"),
        ({}, {"t": -1}, "position -1 found"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, header: dict[str, Any], line: dict[str, Any], message: str
) -> None:
    lines = entries(*routing())
    lines[3] |= line
    path = write(tmp_path / "t.jsonl", HEADER | header, lines)
    assert message in refusal(path, "moe-policylang")
