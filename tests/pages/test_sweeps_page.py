"""Every command and program of docs/sweeps.md runs, and prints what stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.consoles import check_console

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("traces", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    (spec,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    Path("sweep.toml").write_text(spec, encoding="utf-8")
    assert len(check_console(PAGE, capsys)) == 4
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {})
    alpha, beta, bound = map(float, capsys.readouterr().out.split())
    assert (alpha, beta) == (0.4, 0.7)
    assert bound > 0
