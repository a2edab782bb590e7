"""llama.cpp: the three layouts of moe-trace, and importance matrices."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.crisp.trace.engines.reading import counts, read, refusal, routing

SIZES = {"n_experts": 16}


def trace_lines(experts: np.ndarray, prompt: int, *, pruned: bool = False) -> list[str]:
    """``pos,layer,ids``: layer by layer for the prompt, token by token for what is new."""
    tokens, layers, _ = experts.shape
    order = [(t, x) for x in range(layers) for t in range(prompt)]
    order += [(t, x) for t in range(prompt, tokens) for x in range(layers)]
    if pruned:  # the last layer is run for the prompt's last token only
        order = [(t, x) for t, x in order if x < layers - 1 or t >= prompt - 1]
    return [f"{t - prompt},{x}," + ",".join(map(str, experts[t, x])) for t, x in order]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_positions_of_prompts_are_negative(tmp_path: Path) -> None:
    experts = routing(9).experts
    log = read(write(tmp_path / "t.csv", trace_lines(experts, 5)), "llama.cpp", **SIZES)
    np.testing.assert_array_equal(log.trace.experts, experts)
    assert log.trace.position.tolist() == list(range(9))
    assert log.trace.phase.tolist() == [0] * 5 + [1] * 4
    assert (log.absent, log.notes) == (0, ())


def test_concatenated_profiles_are_sequences(tmp_path: Path) -> None:
    a, b, c = (routing(n, seed=n).experts for n in (9, 6, 4))
    lines = [*trace_lines(a, 5), *trace_lines(b, 6), *trace_lines(c, 1)]
    trace = read(write(tmp_path / "t.csv", lines), "llama.cpp", **SIZES).trace
    np.testing.assert_array_equal(trace.experts, np.concatenate([a, b, c]))
    assert trace.sequence.tolist() == [0] * 9 + [1] * 6 + [2] * 4


def test_a_pruned_last_layer_is_absent(tmp_path: Path) -> None:
    a, b = routing(9, seed=1).experts, routing(6, seed=2).experts
    lines = [*trace_lines(a, 5, pruned=True), *trace_lines(b, 3, pruned=True)]
    log = read(write(tmp_path / "t.csv", lines), "llama.cpp", **SIZES)
    expected = np.concatenate([a, b])
    expected[[0, 1, 2, 3, 9, 10], 2] = -1
    np.testing.assert_array_equal(log.trace.experts, expected)
    assert log.absent == 6
    assert log.notes == (
        "6 of 15 rows lack 6 MoE layers: layer 2 was not run for all tokens of prompts (it was "
        "pruned): no expert is run there",
    )


def test_strided_views_are_refused(tmp_path: Path) -> None:
    """Read as contiguous, the first rows are the whole ranking of the first token."""
    tokens, layers, n_experts, k = 12, 4, 64, 4
    random = np.random.default_rng(0)
    rank = random.permuted(np.tile(np.arange(n_experts), (layers, tokens, 1)), axis=2)
    right = rank[..., :k].transpose(1, 0, 2)
    wrong = rank.reshape(layers, -1)[:, : tokens * k].reshape(layers, tokens, k).transpose(1, 0, 2)
    good = write(tmp_path / "good.csv", trace_lines(right, tokens))
    np.testing.assert_array_equal(read(good, "llama.cpp", n_experts=n_experts).trace.experts, right)
    bad = write(tmp_path / "bad.csv", trace_lines(wrong, tokens))
    assert "FILE: no expert occurs twice in the first 16 rows of prompts: the strided" in refusal(
        bad, n_experts=n_experts
    )
    # Two rows without an expert twice say nothing.
    few = write(tmp_path / "few.csv", trace_lines(wrong[:2, :1], 2))
    assert read(few, "llama.cpp", n_experts=n_experts).trace.rows == 2


def test_phase_token_layer_rank_expert(tmp_path: Path) -> None:
    a, b = routing(9, seed=1).experts, routing(6, seed=2).experts
    lines = ["phase,token,layer,rank,expert"]
    for experts, prompt in ((a, 5), (b, 6)):
        for t, layer in [(t, x) for x in range(3) for t in range(prompt)] + [
            (t, x) for t in range(prompt, len(experts)) for x in range(3)
        ]:
            phase = "prefill" if t < prompt else "decode"
            lines += [f"{phase},{t},{layer},{r},{e}" for r, e in enumerate(experts[t, layer])]
    trace = read(write(tmp_path / "t.csv", lines), "llama.cpp", **SIZES).trace
    np.testing.assert_array_equal(trace.experts, np.concatenate([a, b]))
    assert trace.phase.tolist() == [0] * 5 + [1] * 4 + [0] * 6
    lines[1] = "warmup,0,0,0,1"
    assert "phase 'warmup' found" in refusal(write(tmp_path / "t.csv", lines))


def test_one_row_an_activation(tmp_path: Path) -> None:
    """Tokens follow from the runs of a layer: here 5 x 2 ids in prompts, 2 in decode."""
    a, b = routing(9, seed=1).experts, routing(6, seed=2).experts
    lines = ["layer,expert"]
    for experts, prompt in ((a, 5), (b, 3)):
        passes = [range(prompt), *([t] for t in range(prompt, len(experts)))]
        lines += [f"{x},{e}" for p in passes for x in range(3) for t in p for e in experts[t, x]]
    log = read(write(tmp_path / "t.csv", lines), "llama.cpp", **SIZES)
    np.testing.assert_array_equal(log.trace.experts, np.concatenate([a, b]))
    assert log.trace.sequence.tolist() == [0] * 9 + [1] * 6
    assert log.trace.phase.tolist() == [0] * 5 + [1] * 4 + [0] * 3 + [1] * 3
    assert log.notes[0].startswith("1 pass of several rows after decode tokens: taken as new")
    assert "no multiple of top-3" in refusal(tmp_path / "t.csv", top_k=3)
    # The last layer of the prompt was run for its last token only.
    pruned = [f"{x},{e}" for x in range(2) for t in range(5) for e in a[t, x]]
    pruned += [f"{x},{e}" for t, x in [(4, 2), (5, 0), (5, 1), (5, 2)] for e in a[t, x]]
    cut = read(write(tmp_path / "c.csv", ["layer,expert", *pruned]), "llama.cpp", **SIZES)
    expected = a[:6].copy()
    expected[:4, 2] = -1
    np.testing.assert_array_equal(cut.trace.experts, expected)
    # Without decode tokens k does not follow; told, it does.
    prompt = [f"{x},{e}" for x in range(3) for t in range(5) for e in a[t, x]]
    path = write(tmp_path / "p.csv", ["layer,expert", *prompt])
    assert "--top-k does say" in refusal(path)
    np.testing.assert_array_equal(read(path, "llama.cpp", top_k=2, **SIZES).trace.experts, a[:5])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-1,0,3,4\n-1,1,3\n", "FILE: CSV parse error"),
        ("-1,0,3,4\n0,0,3,x\n", "FILE: In CSV column #3"),
        ("-1,0,3,4\n0,0,3,\n", "column 3 has an empty cell"),
        ("-1,0,3,16\n", "expert 16 found; expected 0 to 15"),
        ("-1,0,3,3\n", "experts [3, 3]; one of them twice"),
        ("-1,99999,3,4\n", "layer 99999 found"),
        ("layer,expert\n0,1\n0,2\n-7,1\n", "layer -7 found"),
        ("layer,expert\n", "holds no routing"),
        ("phase,token,layer,rank,expert\ndecode,0,0,2000,1\n", "a rank beyond 1,024"),
        ("phase,token,layer,rank,expert\ndecode,99999999999,0,0,1\n", "position 99999999999"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    assert message in refusal(tmp_path / "t.csv", "llama.cpp")


def gguf(tensors: dict[str, np.ndarray], *, claimed: int | None = None) -> bytes:
    """A GGUF file of float32 tensors, written by the format's description."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = struct.pack("<4sIQQ", b"GGUF", 3, claimed or len(tensors), 1)
    head += text("general.type") + struct.pack("<I", 8) + text("imatrix")
    data = b""
    for name, array in tensors.items():
        head += text(name) + struct.pack("<I", array.ndim)
        head += struct.pack(f"<{array.ndim}Q", *array.shape[::-1])
        head += struct.pack("<IQ", 0, len(data))
        data += array.astype("<f4").tobytes()
        data += b"\0" * (-len(data) % 32)
    return head + b"\0" * (-len(head) % 32) + data


def test_an_importance_matrix_counts(tmp_path: Path) -> None:
    tensors = {
        f"blk.{layer}.ffn_{kind}_exps.weight.counts": np.arange(8).reshape(1, 8) + 10 * layer
        for layer in (1, 2)
        for kind in ("gate", "up", "down")
    }
    tensors["blk.0.ffn_up.weight.counts"] = np.array([[5]])
    path = tmp_path / "imatrix.gguf"
    path.write_bytes(gguf(tensors))
    found = counts(path, "llama.cpp").counts
    assert found.tolist() == [[0] * 8, list(range(10, 18)), list(range(20, 28))]
    whole = gguf(tensors)
    for cut in (20, 100, len(whole) - 40):
        path.write_bytes(whole[:cut])
        assert re.search("FILE: .*(cut off|too many for its)", refusal(path, "llama.cpp"))
    path.write_bytes(gguf(tensors, claimed=1 << 60))
    assert "FILE: says 1,152,921,504,606,846,976 tensors, too" in refusal(path, "llama.cpp")
    path.write_bytes(gguf({"blk.0.ffn_up.weight.counts": np.array([[5]])}))
    assert "has no counts of experts" in refusal(path, "llama.cpp")
    for wrong in (float("nan"), -1.0):
        path.write_bytes(gguf({"blk.0.ffn_up_exps.weight.counts": np.array([[1.0, wrong]])}))
        assert "FILE" in refusal(path, "llama.cpp")
    path.write_bytes(
        gguf({
            "blk.1.ffn_up_exps.weight.counts": np.array([[5, 0, 7]]),
            "blk.3.ffn_gate_exps.weight.counts": np.array([[1, 2, 3]]),
        })
    )  # fmt: skip
    assert counts(path, "llama.cpp").counts.tolist() == [[0] * 3, [5, 0, 7], [0] * 3, [1, 2, 3]]
