"""``crisp trace import``: logs by name and by content, sizes, notes, what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from crisp.cli.main import main
from crisp.trace import RoutingTrace
from crisp.trace.importing.engines import ENGINES

OUT = "o.trace.safetensors"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def crisp(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out + err


def imported(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[RoutingTrace, list[str]]:
    code, text = crisp(capsys, "trace", "import", *arguments, "--out", OUT)
    assert code == 0, text
    return RoutingTrace.load(OUT), text.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    before = sorted(Path().iterdir())
    code, text = crisp(capsys, "trace", "import", *arguments, "--out", OUT)
    assert code == 2
    assert text.count("\n") == 1
    assert sorted(Path().iterdir()) == before, "something was left behind"
    return text.strip()


def draw(tokens: int, layers: int, k: int, n_experts: int) -> np.ndarray:
    ids = np.tile(np.arange(n_experts), (tokens, layers, 1))
    return np.random.default_rng(0).permuted(ids, axis=2)[..., :k]


def test_the_documentation_has_every_engine() -> None:
    text = (Path(__file__).parents[4] / "docs" / "traces.md").read_text(encoding="utf-8")
    assert not [name for name in ENGINES if f"| `{name}` |" not in text]


def test_by_name_and_by_content(capsys: pytest.CaptureFixture[str]) -> None:
    experts = draw(6, 3, 2, 16)
    np.save("routed.npy", experts)
    trace, lines = imported(capsys, "routed.npy", "--experts", "16")
    np.testing.assert_array_equal(trace.experts, experts)
    assert lines == [
        "note: routed.npy is taken as --from array, by its content",
        "note: no phases: all taken as decode",
        f"{OUT}: 6 rows of 6 logged rows, 1 sequence, 3 layers, top-2",
    ]
    named, lines = imported(
        capsys, "routed.npy", "--experts", "16", "--from", "vllm", "--dataset", "d", "--unordered"
    )
    assert named.header.note == "imported from routed.npy, a log of vllm"
    assert (named.header.dataset, named.header.ordered) == ("d", False)
    assert len(lines) == 2
    assert "--model does, or crisp trace import --experts" in refused(capsys, "routed.npy")
    assert "has 3 layers, --layers says 4" in refused(
        capsys, "routed.npy", "--experts", "16", "--layers", "4"
    )


def test_several_files_are_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.npy", "b.npy"):
        np.save(name, draw(4, 3, 2, 16))
    trace, _ = imported(capsys, "a.npy", "b.npy", "--experts", "16")
    assert trace.sequence.tolist() == [0] * 4 + [1] * 4


def test_a_model_places_layers_that_count_moe_ones_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """deepseek-moe-16b: 28 layers, the first dense, 64 experts, top-6."""
    experts = draw(4, 27, 6, 64)
    np.save("moe.npy", experts)
    trace, lines = imported(capsys, "moe.npy", "--model", "deepseek-moe-16b")
    assert trace.layers == 28
    assert (trace.experts[:, 0] == -1).all()
    np.testing.assert_array_equal(trace.experts[:, 1:], experts)
    assert (
        "note: the log counts MoE layers only: its 27 are layers 1 to 27 of deepseek-moe-16b"
        in lines
    )
    whole = np.zeros((4, 28, 6), int)
    whole[:, 1:] = experts  # dense layers were never written: zeros
    np.save("all.npy", whole)
    again, lines = imported(capsys, "all.npy", "--model", "deepseek-moe-16b")
    assert again.digest() == trace.digest()
    assert not [line for line in lines if "MoE layers only" in line]
    assert trace.header.spec is not None
    np.save("few.npy", experts[:, :9])
    assert "has 27 MoE layers (1 to 27)" in refused(
        capsys, "few.npy", "--model", "deepseek-moe-16b"
    )
    np.save("k.npy", experts[..., :4])
    _, lines = imported(capsys, "k.npy", "--model", "deepseek-moe-16b")
    assert (
        "note: deepseek-moe-16b routes to 6 experts, the log has 4: "
        f"crisp simulate {OUT} --top-k 4 takes it as it is" in lines
    )


def test_counts_become_a_synthetic_trace_and_a_profile(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = [(layer, e, 10 * (8 - e)) for layer in range(2) for e in range(8)]
    text = "".join(f"{layer} {e} {n}\n" for layer, e, n in counts)
    Path("usage").write_text("-1 2 8\n-2 1 7\n" + text)
    assert "counts do not say how many experts a token has; --model or --top-k does" in refused(
        capsys, "usage"
    )
    trace, lines = imported(capsys, "usage", "--top-k", "2")
    assert (trace.header.origin, trace.header.seed, trace.rows) == ("synthetic", 0, 180)
    assert "were drawn from them, independent of each other" in lines[1]
    assert lines[-1] == f"{OUT}: 180 rows, 1 sequence, 2 layers, top-2, synthetic"
    _, text = crisp(capsys, "trace", "info", OUT)
    assert "synthetic, seed 0" in text
    Path(OUT).rename("profile.trace.safetensors")
    np.save("routed.npy", draw(40, 2, 2, 8))
    imported(capsys, "routed.npy", "--experts", "8")
    arguments = ("--model", "mixtral-8x7b", "--layers", "2", "--policy", "lru", "--cache", "static")
    code, text = crisp(
        capsys, "simulate", OUT, *arguments, "--profile", "profile.trace.safetensors",
        "--budget", "50%", "--bits", "4.25",
    )  # fmt: skip
    assert code == 0, text


@pytest.mark.seconds
def test_a_row_without_a_layer_runs_nothing_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Two layers, four prompt tokens, the last layer for the last of them only."""
    lines = [f"{t - 4},0,{t},{t + 1}" for t in range(4)] + ["-1,1,0,1", "0,0,0,1", "0,1,2,3"]
    Path("t.csv").write_text("".join(line + "\n" for line in lines))
    trace, said = imported(capsys, "t.csv", "--experts", "8")
    assert (trace.experts[:3, 1] == -1).all()
    assert (
        "note: 3 of 5 rows lack 3 MoE layers: layer 1 was not run for all tokens of prompts"
        in (said[1][: len(said[1]) - len(" (it was pruned): no expert is run there")])
    )
    _, text = crisp(capsys, "trace", "info", OUT)
    assert "absent     3 of 10 (row, MoE layer)s have no expert" in text
    code, _ = crisp(capsys, "trace", "validate", OUT)
    assert code == 0
    arguments = (OUT, "--model", "mixtral-8x7b", "--layers", "2", "--bits", "4.25")
    run = ("--policy", "lru", "--budget", "100%", "--phase", "all", "--chunk", "1")
    metrics = []
    for engine in ("simpy", "fast"):
        code, text = crisp(
            capsys, "simulate", *arguments, *run, "--engine", engine, "--json", f"{engine}.json"
        )
        assert code == 0, text
        metrics.append(json.loads(Path(f"{engine}.json").read_text())["metrics"])
    assert metrics[0] == metrics[1]
    # The last three rows run (the first two are the profile); the first of them lacks a layer.
    assert metrics[0]["tasks"] == 2 + 4 + 4


def test_tables_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text("sequence,token,layer,e0,e1\ncmpl-7,0,0,2,11\ncmpl-7,0,1,3,5\n")
    sizes = ("--experts", "16", "--layers", "2")
    for named in ((), ("--from", "table"), ("--from", "csv")):
        trace, lines = imported(capsys, "t.csv", *sizes, *named)
        assert trace.experts.tolist() == [[[2, 11], [3, 5]]]
        assert lines[0].startswith("note: sequences are text or large numbers: numbered from 0")
    expected = "import: expected either --model, or --experts and --layers"
    assert expected in refused(capsys, "t.csv", "--experts", "16")
    assert "a table is one" in refused(capsys, "t.csv", "t.csv", *sizes)
    assert "--top-k: is for router logits" in refused(capsys, "t.csv", *sizes, "--top-k", "2")


def test_columns(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text("problem_id,pos,layer,e0,e1\n4,0,0,2,11\n4,0,1,3,5\n")
    sizes = ("--experts", "16", "--layers", "2")
    trace, _ = imported(capsys, "t.csv", *sizes, "--column", "sequence=problem_id, token=pos")
    assert trace.sequence.tolist() == [4]
    assert "expected OURS=THEIRS" in refused(capsys, "t.csv", *sizes, "--column", "sequence")
    assert "names token twice" in refused(capsys, "t.csv", *sizes, "--column", "token=a,token=b")
    assert "--column: is for tables" in refused(
        capsys, "t.csv", "--from", "vllm", "--column", "token=pos"
    )


def test_options_that_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    np.save("a.npy", draw(4, 3, 2, 16))
    assert "no such file" in refused(capsys, "b.npy", "--experts", "16")
    assert "; found both" in refused(capsys, "a.npy", "--model", "mixtral-8x7b", "--layers", "3")
    assert "--drop-incomplete: is for tables" in refused(
        capsys, "a.npy", "--experts", "16", "--drop-incomplete"
    )
    assert "unknown importer 'vlm'; did you mean 'vllm'?" in refused(
        capsys, "a.npy", "--from", "vlm", "--experts", "16"
    )


CASES = {
    "01-import-arrow-traceback/u64hash.parquet": None,
    "01-import-arrow-traceback/jsonstr.parquet": None,
    "01-import-arrow-traceback/halfids.parquet": "column experts has 2.5; expected whole numbers",
    "01-import-arrow-traceback/badstrw.parquet": "column weights has 'n/a'; expected numbers",
    "03-import-serving-formats/routed.npy": None,
    "03-import-serving-formats/sgl.pt": "record 0: all ids are 0: nothing was captured (taken as "
    "--from sglang, by its content)",
    "03-import-serving-formats/strid.csv": None,
    "03-import-serving-formats/strid.parquet": None,
    "03-import-serving-formats/i64hash.parquet": None,
    "03-import-serving-formats/moe_trace.csv": None,
    "05-import-jsonl-first-line/ok.jsonl": None,
    "05-import-jsonl-first-line/firstnow.jsonl": "column weights: a row has no list, others have",
}


@pytest.mark.parametrize("name", CASES)
def test_inputs_that_failed(capsys: pytest.CaptureFixture[str], shared: Path, name: str) -> None:
    path = str(shared / "cases" / name)
    if path.endswith(".pt"):
        pytest.importorskip("torch")
    message = CASES[name]
    arguments = (path, "--experts", "16", "--layers", "3")
    if message is not None:
        assert refused(capsys, *arguments).endswith(message)
        return
    trace, _ = imported(capsys, *arguments)
    if name.startswith("01"):
        assert trace.experts[0].tolist() == [[2, 11], [4, 15], [4, 11]]
    if name.endswith("moe_trace.csv"):
        assert trace.experts.tolist() == [[[3, 1], [2, 0], [-1, -1]]]


def test_padded_and_real_tables_run_alike(capsys: pytest.CaptureFixture[str], shared: Path) -> None:
    folder = shared / "cases" / "02-import-padding-rows"
    sizes = ("--experts", "8", "--layers", "4")
    real, _ = imported(capsys, str(folder / "real.parquet"), *sizes)
    padded, lines = imported(capsys, str(folder / "padded.parquet"), *sizes)
    assert padded.digest() == real.digest()
    assert "note: 160 tokens without any expert (padding): left out" in lines


def npy(shape: tuple[int, ...], dtype: str = "<i8") -> bytes:
    """A .npy that says ``shape``, with 96 bytes of data."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(96)


@pytest.mark.parametrize(
    ("name", "content", "found", "expected"),
    [
        ("a.json", b'{"hello": [1, 2]}', "an object with hello", "vllm (choices with routed_"),
        ("a.json", b"[1, 2, 3]", "a list of 3, the first int", "sglang (meta_info with routed"),
        ("a.npy", npy((4, 3)), "int64 [4, 3]", "array (expert ids [tokens, layers, k])"),
        ("a.npy", npy((1, 1, 1), "<c8"), "complex64 [1, 1, 1]", "moe-infinity (counts [seq"),
        (
            "a.dat",
            struct.pack("<ii", 40, 24) + b"blk.0.ffn_up_exps.weight" + bytes(64),
            "is an importance matrix in llama.cpp's old format",
            "--from names its kind",
        ),
        ("a.bin", b"\0\1\2", "is no text", "--from names its kind: bigmoeonedge, vllm"),
        ("a.gguf", b"GGUF\3\0\0\0" + bytes(16), "GGUF file with nothing", "llama.cpp (an imatrix"),
    ],
)
def test_what_is_not_recognised_is_described(
    capsys: pytest.CaptureFixture[str], name: str, content: bytes, found: str, expected: str
) -> None:
    Path(name).write_bytes(content)
    for sizes in ([], ["--experts", "8", "--layers", "3", "--top-k", "2"]):
        line = refused(capsys, name, *sizes)
        assert line.startswith(f"error: {name}: ")
        assert "not recognised as a log" in line
        assert found in line
        assert expected in line


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"", "is empty"),
        (
            "a.json",
            b'{"choices": [{"routed_experts": [[[' + b"9" * 6000 + b"]]]}]}",
            "more than 4,30",
        ),
        ("a.json", b'{"x": ' + b"[" * 100_000, "not JSON (nested too deeply)"),
        ("a.npy", b"junk", "not a .npy array, or its header is damaged"),
        ("a.npy", npy((-1, 3, 2)), "[-1, 3, 2] is no shape of an array"),
        ("a.npy", npy((-4, -3, 2)), "[-4, -3, 2] is no shape of an array"),
        ("a.npy", npy((1 << 60, 0, 2)), "[1152921504606846976, 0, 2] is no shape of an array"),
        ("a.npy", npy((9, 3, 2)), "[9, 3, 2] of int64 need 432 bytes, 96 are there"),
        ("a.npy", npy((2, 3, 2), "|O"), "holds object; numbers were expected"),
        ("a.npz", b"junk", "not a whole .npz file"),
        ("a.gguf", b"junk", "is no GGUF file"),
        ("a.safetensors", b"junk" * 9, "not a whole safetensors file"),
        ("a.csv", b"", "its first line is empty"),
        ("a.csv", bytes(range(256)), "its first line is not text with the names of columns"),
        ("a.csv", "sequence,token".encode("utf-16"), "its first line is not text"),
        ("a.csv", b"x" * 200_000, "its first line is not text"),
        ("a.csv", b"sequence,token,layer,e0\n0,0,0," + b"1" * (5 << 20), "a line is too long"),
        ("a.csv", b"0,0," + b"9" * 6000 + b",2\n-1,1,3,2\n", "invalid value"),
        (
            "a.jsonl",
            b'{"sequence": ' + b"9" * 6000 + b', "token": 0, "layer": 0, "e0": 1}',
            "99\u2026",
        ),
        ("a.jsonl", b'{"sequence": ' + b"[" * 100_000 + b"\n", "a line is nested too deeply"),
    ],
)
def test_damaged_files_are_one_short_line(
    capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    Path(name).write_bytes(content)
    line = refused(capsys, name, "--experts", "8", "--layers", "3")
    assert line.startswith(f"error: {name}: ")
    assert message in line
    assert len(line) < 300


def test_brackets_inside_texts_nest_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"text": '["' * 999 + "\\", "sequence": 0, "token": 0, "layer": layer, "experts": [1, 2]}
        for layer in range(3)
    ]
    Path("a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace, _ = imported(capsys, "a.jsonl", "--experts", "8", "--layers", "3")
    assert trace.experts.tolist() == [[[1, 2]] * 3]


@pytest.mark.parametrize(
    ("option", "size"),
    [("--experts", "0"), ("--experts", "32768"), ("--layers", "-1"), ("--top-k", "0")],
)
def test_sizes_that_no_model_has(
    capsys: pytest.CaptureFixture[str], option: str, size: str
) -> None:
    np.save("a.npy", draw(3, 3, 2, 8))
    assert refused(capsys, "a.npy", option, size).startswith(f"error: {option} {size}: expected 1")


def test_a_pickle_is_never_run_nor_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    planted = b"cos\nsystem\n(S'touch planted'\ntR."
    for name in ("a.pt", "b.pth"):
        Path(name).write_bytes(planted)
        assert "nothing of it was run" in refused(capsys, name, "--experts", "8")
    assert not Path("planted").exists()


def test_files_that_belong_to_the_log_are_not_replaced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("manifest.json").write_text("{}")
    Path("events.safetensors").write_bytes(b"events")
    code, text = crisp(capsys, "trace", "import", "manifest.json", "--out", "events.safetensors")
    assert code == 2
    assert "--out events.safetensors: would replace FILE events.safetensors" in text
    assert Path("events.safetensors").read_bytes() == b"events"
