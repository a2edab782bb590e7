"""Names of bundled traces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from crisp.errors import CrispError
from crisp.trace import RoutingTrace, bundled


@pytest.fixture
def package(tmp_path: Path, monkeypatch) -> Path:
    """A package in a checkout that has a trace and something else."""
    inside = tmp_path / "crisp"
    (inside / "trace").mkdir(parents=True)
    monkeypatch.setattr(bundled, "__file__", str(inside / "trace" / "bundled.py"))
    (tmp_path / "traces").mkdir()
    for name in ("b.trace.safetensors", "a.x.trace.safetensors", "README.md", "model.safetensors"):
        (tmp_path / "traces" / name).touch()
    return inside


def test_a_checkout_has_them_in_traces(package: Path) -> None:
    folder = package.parent / "traces"
    expected = {"a.x": folder / "a.x.trace.safetensors", "b": folder / "b.trace.safetensors"}
    assert bundled.bundled_traces() == expected
    assert bundled.resolve_trace("b") == expected["b"]


def test_a_wheel_has_them_inside_the_package(package: Path) -> None:
    (package / "bundled_traces").mkdir()
    (package / "bundled_traces" / "c.trace.safetensors").touch()
    assert list(bundled.bundled_traces()) == ["c"]


def test_a_file_comes_before_a_bundled_trace(package: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b").touch()
    assert bundled.resolve_trace("b") == Path("b")


def test_unknown_names(package: Path) -> None:
    with pytest.raises(CrispError, match=r"^unknown trace 'ax'; did you mean 'a\.x'"):
        bundled.resolve_trace("ax")
    for path in ("x/b", "./b", "b.safetensors", "b.csv"):
        with pytest.raises(CrispError, match=f"^{re.escape(path)}: no such file$"):
            bundled.resolve_trace(path)


def test_all_bundled_traces_are_whole() -> None:
    for path in bundled.bundled_traces().values():
        RoutingTrace.load(path)
