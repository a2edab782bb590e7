"""Every command of docs/device.md runs, in its order, and prints what stands there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.consoles import check_console

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    monkeypatch.chdir(tmp_path)
    printed = check_console((ROOT / "docs" / "device.md").read_text(encoding="utf-8"), capsys)
    assert len(printed) == 11
    for what in ("load order", "computed blocks", "resident blocks after each event"):
        assert f"{what}: identical" in printed[6]  # of the replay
        assert f"{what}: identical" in printed[9]  # of the text that was written
    assert json.loads(Path("both.json").read_text(encoding="utf-8"))
