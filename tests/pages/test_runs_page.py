"""Every command of docs/runs.md runs, in its order, and prints what stands there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.consoles import check_console

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


@pytest.mark.seconds
def test_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    assert len(check_console(page, capsys)) == 6
    repeats = json.loads(Path("measured.json").read_text(encoding="utf-8"))["provenance"]["repeats"]
    assert [len(values) for values in repeats["each"].values()] == [3] * len(repeats["each"])
    metrics = json.loads(Path("both.json").read_text(encoding="utf-8"))["metrics"]
    assert metrics["bytes_per_token"] is None
    total = sum(
        metrics[f"{phase}_bytes_per_token"] * metrics[f"{phase}_tokens"]
        for phase in ("decode", "prefill")
    )
    assert total == pytest.approx(metrics["bytes_loaded"], rel=1e-12)
