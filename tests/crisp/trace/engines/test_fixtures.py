"""One real trace in the layouts of eight logs: every importer finds the same routing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.crisp.trace.engines.reading import counts, read

SIZES = {"n_experts": 128, "n_layers": 48, "top_k": 6}
LOGS = {
    "vllm_latest_response.json": "vllm",
    "vllm_routed_experts.npz": "array",
    "sglang_response.json": "sglang",
    "llamacpp_moe_trace.csv": "llama.cpp",
    "llamacpp_pr28544.csv": "llama.cpp",
    "colibri_route_trace.txt": "colibri",
    "policylang.jsonl": "moe-policylang",
    "policylang.parquet": "moe-policylang",
}
WEIGHTED = ("colibri", "moe-policylang")


@pytest.mark.parametrize("name", LOGS)
def test_the_truth(shared: Path, name: str) -> None:
    folder = shared / "logs" / "fixtures"
    truth = np.load(folder / "truth.npz")
    trace = read(folder / name, LOGS[name], **SIZES).trace
    np.testing.assert_array_equal(trace.experts, truth["experts"])
    assert trace.sequence.tolist() == [0] * 40
    assert trace.position.tolist() == list(range(40))
    told = name not in ("llamacpp_pr28544.csv", "colibri_route_trace.txt")  # nothing tells phases
    assert trace.phase.tolist() == [0 if told else 1] + [1] * 39
    if LOGS[name] in WEIGHTED:
        assert trace.weights is not None
        np.testing.assert_allclose(trace.weights, truth["weights"], atol=3e-4)
    else:
        assert trace.weights is None


def test_the_truth_in_counts(shared: Path) -> None:
    folder = shared / "logs" / "fixtures"
    experts = np.load(folder / "truth.npz")["experts"]
    expected = np.stack([np.bincount(experts[:, n].ravel(), minlength=128) for n in range(48)])
    found = counts(folder / "coli_usage.txt", "colibri").counts
    np.testing.assert_array_equal(found, expected)


def test_real_files(shared: Path) -> None:
    logs = shared / "logs"
    log = read(logs / "llamacpp-moe-trace" / "excerpt.csv", "llama.cpp", n_experts=256)
    assert log.trace.experts.shape == (28, 1, 8)
    assert log.trace.experts[0, 0].tolist() == [188, 92, 112, 238, 66, 106, 43, 144]
    assert log.trace.phase.tolist() == [0] * 28
    log = read(logs / "moe-cache-eval" / "events.csv", "moe-cache-eval")
    assert log.trace.experts.shape == (5, 3, 2)
    assert log.trace.header.n_experts == 4  # of the manifest beside it
