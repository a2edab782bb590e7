"""Every command and program of docs/preparation.md runs, and prints what stands there."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest

from crisp.cli.main import main

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "preparation.md").read_text(encoding="utf-8")


def test_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("traces", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    (console,) = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    done = re.findall(r"^\$ crisp (.*)\n((?:(?!\$ ).*\n)*)", console, re.MULTILINE)
    assert len(done) == 3
    for command, expected in done:
        with pytest.raises(SystemExit) as end:
            main(shlex.split(command))
        out, err = capsys.readouterr()
        assert (end.value.code or 0, err) == (0, "")
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert doctest.OutputChecker().check_output(expected, out, flags), f"{command}:\n{out}"
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {})
    assert re.fullmatch(r"\d+ tokens, \d\.\d+ MB each\n", capsys.readouterr().out)
