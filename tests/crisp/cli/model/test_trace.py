"""``crisp trace``: every command of the documentation runs and prints what stands there."""

from __future__ import annotations

import doctest
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from crisp.cli.main import main
from crisp.trace import RoutingTrace

ROOT = Path(__file__).parents[4]
DOCS = ROOT / "docs" / "traces.md"


def crisp(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the example files of the documentation."""
    monkeypatch.chdir(tmp_path)
    files = re.findall(r"`(\w+\.csv)`[^`]*?\n\n```csv\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(files) == 3
    for name, text in files:
        (tmp_path / name).write_text(text)
    return tmp_path


def sessions() -> list[tuple[str, str]]:
    """(command, output) of all consoles in the documentation."""
    blocks = re.findall(r"```console\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return re.findall(r"^\$ crisp (.*)\n((?:(?!\$ ).*\n)*)", "".join(blocks), re.MULTILINE)


def test_the_documentation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = sessions()
    assert len(done) == 4
    for command, expected in done:
        code, out, err = crisp(capsys, *shlex.split(command))
        assert (code, err) == (0, "")
        same = doctest.OutputChecker().check_output(expected, out, doctest.ELLIPSIS)
        assert same, f"{command} printed:\n{out}"
    assert (folder / "example.png").read_bytes()[1:4] == b"PNG"
    assert json.loads((folder / "example.json").read_text())["rows"] == 4
    for code_block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL):
        scope: dict[str, object] = {}
        exec(code_block, scope)
        assert scope["decode"].rows == 3  # type: ignore[attr-defined]


def test_json_on_standard_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crisp(capsys, *shlex.split(sessions()[0][0]))
    code, out, _ = crisp(capsys, "trace", "info", "example.trace.safetensors", "--json", "-")
    assert code == 0
    assert json.loads(out)["header"]["origin"] == "imported"


def test_import_for_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = "".join(f"0,0,{layer},1,2,1,1,1\n" for layer in range(32))
    Path("t.csv").write_text("sequence,token,layer,e0,e1,w0,w1,phase\n" + table)
    arguments = ("t.csv", "--out", "t", "--dataset", "d", "--tokenizer", "k", "--unordered")
    code, _, err = crisp(capsys, "trace", "import", *arguments, "--model", "mixtral-8x7b")
    assert (code, err) == (0, "")
    header = RoutingTrace.load("t").header
    assert (header.model, header.dataset, header.tokenizer) == ("mixtral-8x7b", "d", "k")
    assert (header.n_experts, header.ordered) == (8, False)
    assert header.spec is not None
    assert header.spec["n_layers"] == 32
    code, out, _ = crisp(capsys, "trace", "info", "t")
    assert "model      mixtral-8x7b" in out
    assert "fewer activations a layer than combinations" in out
    assert "rows of each 1;" in out
    assert f"digest     {RoutingTrace.load('t').digest()}\n" in out
    lines = out.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert max(map(len, lines)) <= 100
    assert "t: 1 row, 1 sequence, 32 layers (32 MoE)" in crisp(capsys, "trace", "validate", "t")[1]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("validate none.safetensors", "error: none.safetensors: no such file"),
        ("validate routing.csv", "error: routing.csv: not a whole safetensors file"),
        ("info none", "error: unknown trace 'none'"),
        ("info none.csv", "error: none.csv: no such file"),
        ("info no/ne", "error: no/ne: no such file"),
        ("info none --plot t.xyz", "error: t.xyz: expected a name that ends in .png, .pdf or .svg"),
        ("import none.csv --out t --experts 4 --layers 2", "error: none.csv: no such file"),
        ("import routing.csv --out t --experts 4 --layers 1", "error: routing.csv: layer 1 found"),
        ("import routing.csv --out t --experts 3 --layers 2", "error: routing.csv: e0 3 found"),
        ("import routing.csv --out t", "error: import: expected either --model, or"),
        ("import routing.csv --out t --experts 4", "error: import: expected either --model, or"),
        ("import routing.csv --out t --model mixtral", "error: unknown model"),
        ("import routing.csv --out t --model x --layers 2", "error: import: expected either"),
        ("import routing.csv --out no/t --experts 4 --layers 2", "error: --out no/t: the folder"),
        ("synth --pairs x --persistence y --tokens 5 --out t", "error: x: no such file"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    before = sorted(folder.iterdir())
    code, out, err = crisp(capsys, "trace", *shlex.split(command))
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert sorted(folder.iterdir()) == before


def test_statistics_that_no_chain_has_are_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("persistence.csv").write_text("layer,zero,one,two\n0,0.5,0.3,0.2\n")
    arguments = shlex.split("--pairs pairs.csv --persistence persistence.csv --tokens 9 --out t")
    code, out, _ = crisp(capsys, "trace", "synth", *arguments)
    assert code == 0
    assert out.startswith("note: no chain has both statistics of layer 0: off by 0.5\n")
    note = RoutingTrace.load("t").header.note
    assert note is not None
    assert "missed by up to 0.5 (layer 0)" in note


def test_nothing_slow_is_imported_for_a_trace() -> None:
    program = (
        "import sys; import crisp.trace.importing.table, crisp.trace.describe, crisp.trace.plot\n"
        "print([m for m in ('matplotlib', 'torch', 'rich', 'typer', 'numba') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
