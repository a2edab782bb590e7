"""The trace file: round trip, memory, and hostile or broken input."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from crisp.errors import CrispError
from crisp.trace import Header, RoutingTrace


def parts(trace: RoutingTrace) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """What safetensors' own writer takes."""
    arrays = {name: np.ascontiguousarray(array) for name, array in trace.tensors().items()}
    return arrays, trace.header.to_metadata()


def test_round_trip(make, tmp_path: Path) -> None:
    trace = make(
        guess=make(seed=1).experts,
        token=np.arange(12, dtype=np.int32),
        header={
            "seed": 3,
            "model": "null",  # text that looks like JSON stays text
            "spec": {"n_layers": 3, "n_experts": 8, "bits": "17/4"},
            "note": "ünï",
        },
    )
    trace.save(tmp_path / "t.trace.safetensors")
    loaded = RoutingTrace.load(tmp_path / "t.trace.safetensors")
    assert loaded.header == trace.header
    assert loaded.tensors().keys() == trace.tensors().keys()
    for name, array in trace.tensors().items():
        assert loaded.tensors()[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded.tensors()[name], array)
    assert loaded.digest() == trace.digest()


def test_safetensors_itself_reads_and_writes_such_a_file(make, tmp_path: Path) -> None:
    trace = make()
    trace.save(tmp_path / "ours")
    for name, array in load_file(tmp_path / "ours").items():
        np.testing.assert_array_equal(array, trace.tensors()[name])
    arrays, metadata = parts(trace)
    save_file(arrays, tmp_path / "theirs", metadata)
    assert RoutingTrace.load(tmp_path / "theirs").digest() == trace.digest()


def test_every_tensor_starts_on_a_multiple_of_its_item_size(make, tmp_path: Path) -> None:
    make(rows=11, k=1, header={"note": "x"}).save(tmp_path / "t")
    for array in RoutingTrace.load(tmp_path / "t").tensors().values():
        assert array.flags.aligned


def test_loading_a_large_trace_takes_little_memory(make, tmp_path: Path) -> None:
    small = make(rows=2_500, layers=24, k=4, sequences=1)
    rows = np.arange(250_000) % 2_500
    sequence = (np.arange(250_000) // 2_500).astype(np.int32)
    dataclasses.replace(small.select(rows), sequence=sequence).save(tmp_path / "t")
    megabytes = (tmp_path / "t").stat().st_size / 1e6
    assert megabytes > 95
    program = (
        "import re, sys; from pathlib import Path; from crisp.trace import RoutingTrace\n"
        "status = lambda: Path('/proc/self/status').read_text()\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', status())[1]) / 1e3\n"
        "before = peak(); trace = RoutingTrace.load(sys.argv[1])\n"
        "print(peak() - before)"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "t")]
    root = Path(__file__).parents[3]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=root)
    assert float(done.stdout) < megabytes / 2


def test_loaded_arrays_cannot_be_written(make, tmp_path: Path) -> None:
    make().save(tmp_path / "t")
    with pytest.raises(ValueError, match="read-only"):
        RoutingTrace.load(tmp_path / "t").experts[0, 0, 0] = 0


def test_select(make) -> None:
    trace = make()
    part = trace.select(slice(4, 8))
    assert part.rows == 4
    assert np.shares_memory(part.experts, trace.experts)
    np.testing.assert_array_equal(part.weights, trace.weights[4:8])
    chosen = trace.select(np.array([0, 5, 11]))
    np.testing.assert_array_equal(chosen.position, trace.position[[0, 5, 11]])
    assert chosen.guess is None


def test_scores_go_wherever_a_trace_goes(make, tmp_path: Path) -> None:
    scores = np.random.default_rng(0).normal(size=(12, 3, 8)).astype(np.float16)
    trace = make(scores=scores)
    trace.save(tmp_path / "t")
    loaded = RoutingTrace.load(tmp_path / "t")
    assert loaded.digest() == trace.digest() != make().digest()
    np.testing.assert_array_equal(loaded.scores, scores)
    np.testing.assert_array_equal(trace.select(slice(4, 8)).scores, scores[4:8])
    np.testing.assert_array_equal(trace.first_layers(2).scores, scores[:, :2])


def test_magnitudes_go_wherever_a_trace_goes(make, tmp_path: Path) -> None:
    magnitudes = np.random.default_rng(0).uniform(0.5, 2, (12, 3, 2)).astype(np.float16)
    trace = make(magnitudes=magnitudes)
    trace.save(tmp_path / "t")
    loaded = RoutingTrace.load(tmp_path / "t")
    assert loaded.digest() == trace.digest() != make().digest()
    np.testing.assert_array_equal(loaded.magnitudes, magnitudes)
    np.testing.assert_array_equal(trace.select(slice(4, 8)).magnitudes, magnitudes[4:8])
    np.testing.assert_array_equal(trace.first_layers(2).magnitudes, magnitudes[:, :2])


def test_sequences(make) -> None:
    ids, starts, ends = make(rows=7, sequences=3).sequences()  # 3, 2 and 2 rows
    assert (ids.tolist(), starts.tolist(), ends.tolist()) == ([5, 7, 9], [0, 3, 5], [3, 5, 7])
    ids, starts, ends = make().select(slice(0, 0)).sequences()
    assert (len(ids), len(starts), len(ends)) == (0, 0, 0)


def test_moe_layers_are_those_with_an_expert_in_any_row(make) -> None:
    trace = make()
    trace.experts[:, 0] = -1
    trace.experts[:-1, 2] = -1
    assert trace.moe_layers == (1, 2)


def test_digest_covers_what_decides_a_run_and_nothing_else(make) -> None:
    trace = make()
    same = dataclasses.replace(trace.header, time="then", tool="other", note="x", model="m")
    assert dataclasses.replace(trace, header=same).digest() == trace.digest()
    changed = [make(seed=1)]
    for key, value in (("n_experts", 9), ("ordered", False)):
        header = dataclasses.replace(trace.header, **{key: value})
        changed.append(dataclasses.replace(trace, header=header))
    for name in ("sequence", "position", "phase", "weights"):
        other = getattr(trace, name).copy()
        other[-1] += 1
        changed.append(dataclasses.replace(trace, **{name: other}))
    changed.append(dataclasses.replace(trace, guess=trace.experts))
    digests = {other.digest() for other in changed} | {trace.digest()}
    assert len(digests) == len(changed) + 1


def test_a_broken_trace_is_not_saved(make, tmp_path: Path) -> None:
    trace = make()
    trace.experts[3, 1, 0] = 8
    with pytest.raises(CrispError, match="expert 8 found"):
        trace.save(tmp_path / "t")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [0, 5, 8, 100, -100, -1])
def test_a_truncated_file_is_one_line(make, tmp_path: Path, size: int) -> None:
    make().save(tmp_path / "t")
    whole = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(whole[:size])
    with pytest.raises(CrispError, match=r"/t: not a whole safetensors file \(.*\)$"):
        RoutingTrace.load(tmp_path / "t")


def test_other_files_are_one_line(make, tmp_path: Path) -> None:
    def error(path: Path) -> str:
        with pytest.raises(CrispError) as caught:
            RoutingTrace.load(path)
        assert "\n" not in str(caught.value)
        return str(caught.value).removeprefix(f"{path}: ")

    assert error(tmp_path / "none") == "no such file"
    assert error(tmp_path) == "not a file"
    (tmp_path / "text").write_text("sequence,token,layer,e0\n" * 9)
    assert error(tmp_path / "text").startswith("not a whole safetensors file")
    save_file({"w": np.zeros(3, np.float64)}, tmp_path / "model")
    assert error(tmp_path / "model") == "tensor 'w' is F64: not a routing trace"
    save_file({"w": np.zeros(3, np.float16)}, tmp_path / "model")
    assert "not a routing trace" in error(tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "2"}, "trace format version 2; this reads 1"),
        ({"version": None}, "trace format version None; this reads 1"),
        ({"n_experts": None}, "header lacks 'n_experts'"),
        ({"n_experts": "8.5"}, "header: n_experts is '8.5'; expected int"),
        ({"n_experts": "true"}, "header: n_experts is 'true'; expected int"),
        ({"ordered": "yes"}, "header: ordered is 'yes'; expected bool"),
        ({"spec": "[]"}, "header: spec is '[]'; expected dict"),
        ({"n_experts": "0"}, "header: n_experts is 0; expected 1 to 32767"),
        ({"n_experts": "40000"}, "header: n_experts is 40000; expected 1 to 32767"),
        ({"top_k": "3"}, "header: top_k is 3, but rows have 2 experts"),
        ({"n_experts": "1"}, "header: top_k is 2; expected at most the 1 experts"),
        ({"origin": "found"}, "header: origin is 'found'; expected captured, imported, synthetic"),
        ({"origin": "synthetic"}, "header: synthetic, but no seed"),
        ({"spec": json.dumps({"n_layers": 4})}, "header: its model has n_layers 4, the trace 3"),
    ],
)
def test_a_bad_header_is_one_line(make, tmp_path: Path, change, message: str) -> None:
    arrays, metadata = parts(make())
    changed = {key: value for key, value in (metadata | change).items() if value is not None}
    save_file(arrays, tmp_path / "t", changed)
    with pytest.raises(CrispError) as caught:
        RoutingTrace.load(tmp_path / "t")
    assert str(caught.value) == f"{tmp_path / 't'}: {message}"


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("phase", None, "lacks the tensor 'phase'"),
        ("logits", np.zeros(12, np.float16), "has a tensor 'logits'; no trace has"),
        ("phase", np.zeros(11, np.uint8), "phase is uint8 [11]; expected uint8 [12]"),
        ("phase", np.zeros(12, np.int16), "phase is int16 [12]; expected uint8 [12]"),
        ("weights", np.ones((12, 3), np.float16), "weights is float16 [12, 3]; expected"),
        ("experts", np.zeros((12, 3), np.int16), "experts is [12, 3]; expected [rows, layers, k]"),
        ("experts", np.zeros((0, 3, 2), np.int16), "experts is [0, 3, 2]; expected [rows, layers"),
    ],
)
def test_bad_tensors_are_one_line(make, tmp_path: Path, name: str, array, message: str) -> None:
    arrays, metadata = parts(make())
    arrays[name] = array
    save_file({k: v for k, v in arrays.items() if v is not None}, tmp_path / "t", metadata)
    with pytest.raises(CrispError) as caught:
        RoutingTrace.load(tmp_path / "t")
    assert str(caught.value).startswith(f"{tmp_path / 't'}: {message}")


def test_header_fields_are_text_in_the_file() -> None:
    header = Header(n_experts=8, top_k=2, ordered=False, origin="synthetic", seed=7, time="now")
    metadata = header.to_metadata()
    assert metadata == {
        "format": "crisp-trace",
        "version": "1",
        "n_experts": "8",
        "top_k": "2",
        "ordered": "false",
        "origin": "synthetic",
        "seed": "7",
        "tool": header.tool,
        "time": "now",
    }
