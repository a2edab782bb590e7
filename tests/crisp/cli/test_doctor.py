"""crisp doctor: what it looks at, and what it leaves."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hw.disk
from crisp.cli.doctor import EXTRAS
from tests.crisp.cli.test_interrupt import ROOT, interrupted


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hw.disk, "FILE_BYTES", 1 << 20)
    monkeypatch.setattr(hw.disk.read_speed, "__defaults__", (0.01, None))


def told(crisp: Callable, folder: Path, *options: object) -> dict[str, dict[str, Any]]:
    done = crisp("doctor", "--dir", folder, "--json", "-", *options)
    assert done.code == 0, done.err
    return {finding["what"]: finding for finding in json.loads(done.out)}


def test_everything_has_a_line_and_what_is_missing_a_remedy(
    crisp: Callable, tmp_path: Path
) -> None:
    found = told(crisp, tmp_path)
    assert list(found) == [
        "python", "cpu", "memory", "device cpu", "device cuda", "device unified", "O_DIRECT",
        "read speed", "meter RAPL", "extra hf", "extra eval", "extra gpu", "extra jetson",
    ]  # fmt: skip
    for what, finding in found.items():
        planned = what in ("device cuda", "device unified")
        assert finding["ok"] or finding["remedy"] or planned, finding
        assert not (finding["ok"] and finding["remedy"]), finding
        assert not planned or (not finding["ok"] and finding["found"] == "is not built yet")
    assert found["cpu"]["cores"] == 1  # that the fixture allows
    assert found["read speed"]["bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []
    lines = crisp("doctor", "--dir", tmp_path).out.splitlines()
    starts = [line for line in lines if line[:4] in ("ok  ", "--  ")]
    assert len(starts) == len(found)
    assert len(lines) - len(starts) == sum(f["remedy"] is not None for f in found.values())


def test_json_goes_to_a_file_too(crisp: Callable, tmp_path: Path) -> None:
    done = crisp("doctor", "--dir", tmp_path, "--json", tmp_path / "x.json")
    assert done.out.startswith("ok  python")
    assert json.loads((tmp_path / "x.json").read_text())[0]["what"] == "python"


def test_the_extras_are_those_of_the_package() -> None:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = content["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        names = {re.split(r"[\[>=<; ]", package)[0] for package in extras[extra]}
        assert names - {"crisp-moe"} == set(modules.values()), extra
    assert set(extras) - set(EXTRAS) == {"dev"}


def test_a_disk_that_refuses_o_direct(
    crisp: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)
    found = told(crisp, tmp_path)
    assert found["O_DIRECT"]["found"] == f"{tmp_path}: refused: Invalid argument"
    assert "page cache" in found["O_DIRECT"]["remedy"]
    assert found["read speed"]["direct"] is False
    assert "through the page cache" in found["read speed"]["found"]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_finding(
    crisp: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    found = told(crisp, tmp_path)
    for what in ("O_DIRECT", "read speed"):
        assert not found[what]["ok"]
        assert found[what]["found"] == f"{tmp_path}: No space left on device"
        assert "--dir" in found[what]["remedy"]
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_named_with_its_command(
    crisp: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crisp.cli.doctor.find_spec", lambda module: None)
    found = told(crisp, tmp_path)
    assert found["extra jetson"]["found"] == "jetson-stats is missing"
    assert found["extra jetson"]["missing"] == ["jetson-stats"]
    assert found["extra jetson"]["remedy"] == "pip install '.[jetson]' in the checkout"
    assert found["device cpu"]["found"] == "needs torch"


def test_a_store_is_read_in_place_of_a_temporary_file(
    crisp: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    store = tmp_path / "store"
    done = crisp("pack", "--synthetic", ROOT / "traces" / "tiny-mixtral", "--out", store)
    assert done.code == 0, done.err
    files = sorted(store.iterdir())
    found = told(crisp, tmp_path, "--store", store)
    assert found["read speed"]["found"].endswith(f"from {store}/layer-000.safetensors")
    assert sorted(store.iterdir()) == files


def test_mistakes_are_told_in_a_line(crisp: Callable, tmp_path: Path) -> None:
    for options, line in (
        (("--dir", tmp_path / "no"), f"error: --dir {tmp_path / 'no'}: is no folder"),
        (("--store", tmp_path), f"error: {tmp_path}: lacks store.json"),
    ):
        done = crisp("doctor", *options)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(line)


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    def writing(process: int) -> bool:
        return any(tmp_path.glob(".crisp-*"))

    assert interrupted(["doctor"], tmp_path, writing) == "interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_torch_is_never_imported(tmp_path: Path) -> None:
    """As where it is not installed."""
    program = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import hw.disk; hw.disk.FILE_BYTES = 1 << 20\n"
        "import crisp.cli.doctor as own; own.find_spec = lambda module: None\n"
        "from crisp.cli.main import main; main(['doctor'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--  extra hf" in done.stdout
