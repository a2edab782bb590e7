"""The report that is made where there is a GPU, gone through where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("xxhash")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_dry_run_goes_through_all_of_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu", "--dry-run", "--out", tmp_path / "gpu"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu" / "report.json").read_text())
    assert all(isinstance(rows, list) and rows for rows in list(found.values())[1:]), found
    kernels = found["Kernels"]
    assert [(row["dtype"], row["rows"]) for row in kernels] == [
        (dtype, rows) for dtype in ("bf16", "fp16", "fp32", "int8", "int4") for rows in (1, 128)
    ]
    assert {row["error"] for row in kernels} == {0.0}  # the reference against itself
    for row in found["Simulated against measured, and joules"]:
        assert row["same blocks"]
        assert row["J/token"] is None
        assert row["why no joules"]
    page = (tmp_path / "gpu" / "report.md").read_text()
    assert all(f"## {title}\n" in page for title in list(found)[1:])
    assert not [path for path in (tmp_path / "gpu").iterdir() if path.is_dir()]


@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu", "--out", tmp_path / "gpu"],
        capture_output=True, text=True, timeout=100, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "--dry-run goes without one" in done.stderr
