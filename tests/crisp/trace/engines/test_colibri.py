"""colibri: its stream of routing, and the three layouts of its expert history."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.crisp.trace.engines.reading import counts, read, refusal, routing

SIZES = {"n_experts": 16}


def stream(experts: np.ndarray, weights: np.ndarray, prompts: list[int]) -> str:
    """Lines ``call row layer id:gate ..`` of passes of so many rows, one a new token."""
    lines, call, start = [], 0, 0
    for rows in prompts:
        for layer in range(experts.shape[1]):
            for row in range(rows):
                pairs = zip(experts[start + row, layer], weights[start + row, layer], strict=True)
                lines.append(f"{call} {row} {layer} " + " ".join(f"{e}:{w:.4f}" for e, w in pairs))
            call += 1
        start += rows
    return "".join(line + "\n" for line in lines)


def test_passes_are_told_by_falling_layers(tmp_path: Path) -> None:
    experts, weights = routing(9)
    (tmp_path / "r.txt").write_text(stream(experts, weights, [4, 1, 1, 2, 1]))
    log = read(tmp_path / "r.txt", "colibri", **SIZES)
    trace = log.trace
    np.testing.assert_array_equal(trace.experts, experts)
    np.testing.assert_array_equal(trace.weights, weights.astype(np.float16))
    assert trace.sequence.tolist() == [0] * 6 + [1] * 3
    assert trace.position.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert trace.phase.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1]
    assert log.notes == (
        "1 pass of several rows after decode tokens: taken as new prompts (with drafts they would "
        "be verifications, which are not told apart)",
    )


def test_a_model_of_one_layer_is_told_by_its_calls(tmp_path: Path) -> None:
    experts, weights = routing(4, layers=1)
    (tmp_path / "r.txt").write_text(stream(experts, weights, [1, 1, 1, 1]))
    log = read(tmp_path / "r.txt", "colibri", **SIZES)
    np.testing.assert_array_equal(log.trace.experts, experts)
    assert log.notes == (
        "a first pass of one row is taken as decode: prompts of one token look alike",
    )


def test_router_order_is_sorted_by_gate(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("0 0 0 5:0.25 7:0.75\n")
    log = read(tmp_path / "r.txt", "colibri", **SIZES)
    assert log.trace.experts.tolist() == [[[7, 5]]]
    assert "1 row of a layer sorted by weight" in log.notes


def test_layers_of_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    experts, weights = routing(4)
    (tmp_path / "r.txt").write_text(stream(experts, weights, [1, 1, 1, 1]))
    log = read(tmp_path / "r.txt", "colibri", n_layers=2, **SIZES)
    np.testing.assert_array_equal(log.trace.experts, experts[:, :2])
    assert log.notes[0] == "layer 2 and beyond (multi-token prediction): 4 lines left out"
    (tmp_path / "u").write_text("-1 2 4\n-2 1 99\n0 1 7\n1 3 5\n2 0 9\n")
    found = counts(tmp_path / "u", "colibri")
    assert found.counts.tolist() == [[0, 7, 0, 0], [0, 0, 0, 5]]
    assert found.notes == ("layer 2 and beyond (multi-token prediction): left out",)


def test_histories(tmp_path: Path) -> None:
    expected = [[0, 7, 0, 0], [0, 0, 0, 5]]
    (tmp_path / ".coli_usage").write_text("0 1 7\n1 3 5\n")  # without a header
    assert counts(tmp_path / ".coli_usage", "colibri", n_experts=4).counts.tolist() == expected
    dense = np.array(expected, "<u4").tobytes()
    (tmp_path / "h").write_bytes(b"IKU1" + np.array([2, 4], "<u4").tobytes() + dense)
    assert counts(tmp_path / "h", "colibri").counts.tolist() == expected
    (tmp_path / "h").write_bytes(b"IKU1" + np.array([2, 4], "<u4").tobytes() + dense[:-1])
    assert "need 44 bytes, 43 are there" in refusal(tmp_path / "h")
    (tmp_path / "h").write_bytes(b"IKU1" + np.array([2, 4_000_000], "<u4").tobytes())
    assert "says 2 layers of 4,000,000 experts; impossible" in refusal(tmp_path / "h")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 0 0 5:0.25 7:0.75\n1 0 0 5:0.", "line 2 is cut off"),
        ("0 0 0 5:0.25 7\n", "FILE: line 1: '0 0 0 5:0.25 7'"),
        ("0 0 0 5:0.25 5:0.75\n", "one of them twice"),
        ("0 0 0 5:nan 7:0.75\n", "weight nan found"),
        ("0 0 0 16:0.25\n", "expert 16 found"),
        (f"0 0 0 {10**400}:0.25\n", "an expert is out of range"),
        (f"{10**30} 0 0 1:0.25\n", "call, row or layer out of range"),
        ("0 99999999999 0 5:1\n", "row or layer out of range"),
        ("0 0 99999 5:1\n", "row or layer out of range"),
        ("-1 99999999 2\n0 0 1\n", "impossible"),
        ("-1 2 4\n0 9 1\n", "expert 9 found; expected 0 to 3"),
        ("-1 2 4\n0 x 1\n", "FILE: line 2: '0 x 1'"),
        ("-1 2 4\n0 1 99999999999999999999\n", "a number is out of range"),
        ("-1 2 4\n", "counts nothing"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.txt").write_text(text)
    assert message in refusal(tmp_path / "r.txt", "colibri")
