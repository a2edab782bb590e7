"""No command destroys what it reads, or finds out after its work that it cannot write."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from crisp.cli.options.files import check_outputs
from crisp.errors import CrispError
from crisp.trace.bundled import resolve_trace
from tests.crisp.cli.toy import CONFIG

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder: a toy trace under several names, a toy model, texts and tables."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(trace, "t.trace.safetensors")
    Path("link").symlink_to("t.trace.safetensors")
    os.link("t.trace.safetensors", "hard")
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(CONFIG))
    Path("blob").write_text("weights")
    Path("model/model.safetensors").symlink_to("../blob")
    Path("model/sub").mkdir()
    Path("model/sub/notes.txt").write_text("notes")
    Path("text.txt").write_text("text")
    Path("machine.toml").write_text("")
    Path("again").symlink_to(".")
    return tmp_path


SIMULATE = "simulate t.trace.safetensors --policy lru --budget 10% "
EVAL = "eval model --policy up --text text.txt "
CAPTURE = "trace capture model --text text.txt "


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            SIMULATE + "--json t.trace.safetensors",
            "--json t.trace.safetensors: would replace TRACE",
        ),
        (SIMULATE + "--json ./t.trace.safetensors", "would replace TRACE t.trace.safetensors, whi"),
        (SIMULATE + "--json model/../t.trace.safetensors", "would replace TRACE"),
        (SIMULATE + "--timeline link", "--timeline link: would replace TRACE"),
        (SIMULATE + "--perfetto hard", "--perfetto hard: would replace TRACE"),
        (SIMULATE + "--json again/link", "--json again/link: would replace TRACE"),
        (
            SIMULATE + "--profile traces/toy.trace.safetensors --json traces/toy.trace.safetensors",
            "--json traces/toy.trace.safetensors: would replace --profile traces/toy.trace.safeten",
        ),
        (SIMULATE + "--metadata blob --json blob", "--json blob: would replace --metadata blob"),
        (
            SIMULATE + "--hardware machine.toml --json machine.toml",
            "--json machine.toml: would replace --hardware machine.toml",
        ),
        (
            SIMULATE + "--model model/config.json --json model/config.json",
            "--json model/config.json: would replace --model model/config.json",
        ),
        (
            SIMULATE + "--model model --json model/config.json",
            "--json model/config.json: would replace a file of --model model",
        ),
        (SIMULATE + "--json a --perfetto ./a", "--perfetto: --json goes to ./a already"),
        (SIMULATE + "--json a --timeline again/a", "--timeline: --json goes to again/a already"),
        (SIMULATE + "--json a.json/", "--json a.json/: is spelled like a folder"),
        (SIMULATE + "--json /dev/null", "--json /dev/null: is not an ordinary file"),
        (SIMULATE + "--json /proc/a.json", "--json /proc/a.json: cannot be written"),
        (SIMULATE + "--json " + 300 * "x", "cannot be written: File name too long"),
        (SIMULATE + "--metadata .", "--metadata .: is a folder; a file was expected"),
        (EVAL + "--json text.txt", "--json text.txt: would replace --text text.txt"),
        (EVAL + "other.txt --json again/text.txt", "other.txt: no such file"),
        (EVAL + "--json model/config.json", "would replace a file of MODEL model, which is read"),
        (EVAL + "--json model/model.safetensors", "would replace a file of MODEL model"),
        (EVAL + "--json blob", "--json blob: would replace a file of MODEL model"),
        (EVAL + "--json model/sub/notes.txt", "would replace a file of MODEL model"),
        (EVAL + "--metadata blob --json blob", "--json blob: would replace a file of MODEL model"),
        (EVAL + "--metadata hard --json link", "--json link: would replace --metadata hard"),
        (EVAL + "--profile hard --json link", "--json link: would replace --profile hard"),
        (EVAL + "--tasks machine.toml --json machine.toml", "would replace --tasks machine.toml"),
        (EVAL + "--metadata model", "--metadata model: is a folder; a file was expected"),
        (EVAL + "--json /dev/full", "--json /dev/full: is not an ordinary file"),
        (EVAL + "--json a.json/", "--json a.json/: is spelled like a folder"),
        (CAPTURE + "--out text.txt", "--out text.txt: would replace --text text.txt"),
        (CAPTURE + "--out model/config.json", "would replace a file of MODEL model"),
        (
            CAPTURE + "--out again/model/x.trace.safetensors",
            "would be taken for weights in MODEL model; another folder was expected",
        ),
        (CAPTURE + "--out a/", "--out a/: is spelled like a folder"),
        (CAPTURE + "--out -", "--out -: a file name was expected"),
        (
            "trace import text.txt --experts 8 --layers 3 --out again/text.txt",
            "--out again/text.txt: would replace FILE text.txt",
        ),
        (
            "trace import text.txt --model model/config.json --out model/config.json",
            "--out model/config.json: would replace --model model/config.json",
        ),
        (
            "trace synth --pairs text.txt --persistence blob --tokens 9 --out blob",
            "--out blob: would replace --persistence blob",
        ),
        (
            "trace synth --pairs text.txt --persistence blob --tokens 9 --out ./text.txt",
            "--out ./text.txt: would replace --pairs text.txt",
        ),
        ("trace info hard --json link", "--json link: would replace TRACE hard"),
        ("trace info hard --plot a.png --json ./a.png", "--json: --plot goes to ./a.png already"),
        ("trace info hard --plot a.png/", "--plot a.png/: is spelled like a folder"),
        ("demo --out model/config.json", "--out model/config.json: cannot be made: File exists"),
        ("demo --out /proc", "--out /proc/runs.json: cannot be written"),
    ],
)
def test_what_is_refused(folder: Path, crisp: Callable, line: str, message: str) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = crisp(*line.split())
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_in_the_way_of_the_demonstration_is_said_before_the_work(
    folder: Path, crisp: Callable
) -> None:
    Path("out/token.png").mkdir(parents=True)
    done = crisp("demo")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: --out out/token.png: is a folder; a file name was expected\n"


def test_a_bundled_trace_is_as_safe_as_any(folder: Path, crisp: Callable) -> None:
    file = resolve_trace("tiny-mixtral-code")
    before = file.read_bytes()
    asked = ("simulate", "tiny-mixtral-code", "--policy", "fo", "--budget", "10%")
    done = crisp(*asked, "--json", file)
    assert (done.code, file.read_bytes()) == (2, before)
    assert f"--json {file}: would replace TRACE" in done.err


def test_new_files_may_go_anywhere_and_other_old_ones_may_be_replaced(folder: Path) -> None:
    inputs = [("MODEL", "model"), ("--text", "text.txt"), ("--profile", None), ("X", "org/name")]
    check_outputs({"--json": "model/new.json", "--plot": "machine.toml"}, inputs)
    check_outputs({"--json": "-", "--plot": None, "--timeline": "./-"}, inputs)
    with pytest.raises(CrispError, match=r"^--plot: --json goes to - already"):
        check_outputs({"--json": "-", "--plot": "-"}, inputs)
    assert not Path("model/new.json").exists()


@pytest.mark.parametrize(("redirected", "stream"), [(">", "output"), ("2>", "error")])
def test_the_file_that_is_printed_to_is_not_replaced(
    folder: Path, redirected: str, stream: str
) -> None:
    command = f"{sys.executable} -m crisp {SIMULATE} --json a.json {redirected} a.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    told = done.stderr if stream == "output" else Path("a.json").read_text()
    assert told == (
        f"error: --json a.json: would replace the file that standard {stream} goes to\n"
    )
