"""Every command of docs/device.md runs, in its order, and prints what stands there."""

from __future__ import annotations

import doctest
import json
import re
import shlex
from pathlib import Path

import pytest

from crisp.cli.main import main

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "device.md").read_text(encoding="utf-8")


def test_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    monkeypatch.chdir(tmp_path)
    (console,) = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    done = re.findall(r"^\$ crisp (.*)\n((?:(?!\$ ).*\n)*)", console, re.MULTILINE)
    assert len(done) == 7
    for command, expected in done:
        with pytest.raises(SystemExit) as end:
            main(shlex.split(command))
        out, err = capsys.readouterr()
        assert (end.value.code or 0, err) == (0, ""), command
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert doctest.OutputChecker().check_output(expected, out, flags), f"{command}:\n{out}"
    for what in ("load order", "computed pieces", "resident blocks after each event"):
        assert f"{what}: identical" in out
    assert json.loads(Path("both.json").read_text(encoding="utf-8"))
