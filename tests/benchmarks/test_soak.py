"""A shorter `make soak`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SECONDS = 120


@pytest.fixture(scope="module")
def soak() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_random_runs_decide_as_they_should_and_nothing_grows(
    soak: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert soak.soak(SECONDS, seed=1) == 0, capsys.readouterr().out
