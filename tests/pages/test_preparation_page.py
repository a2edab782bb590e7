"""Every command and program of docs/preparation.md runs, and prints what stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from crisp.cli.main import main
from tests.consoles import check_console

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "preparation.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("traces", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    assert len(check_console(PAGE, capsys)) == 3
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for command in "".join(blocks).splitlines():
        with pytest.raises(SystemExit) as end:
            main(shlex.split(command.removeprefix("crisp ")))
        assert not end.value.code, command
    out = capsys.readouterr().out
    assert "losses at 6 widths, on 256 tokens" in out
    assert re.search(r"^crisp +solver\(\.02\) ", out, re.M)
    assert re.search(r"^losses +of policy saliency at 20 % and 13 thresholds", out, re.M)
    assert re.search(r"^saliency +saliency\(0\.\d+\) ", out, re.M)
    assert out.splitlines()[-1].startswith("crisp simulate tiny-mixtral-docs --policy saliency ")
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {})
    assert re.fullmatch(r"\d+ tokens, \d\.\d+ MB each\n", capsys.readouterr().out)
