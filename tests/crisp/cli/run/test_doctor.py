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
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crisp.cli.commands.run.doctor import EXTRAS
from crisp.hardware.energy import Probe
from crisp.hw import telemetry
from crisp.hw.devices import options
from crisp.hw.devices.options import DEVICES
from crisp.hw.store import disk
from tests.crisp.cli.test_interrupt import ROOT, interrupted
from tests.hw.telemetry.test_metering import FakeMeter


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FILE_BYTES", 1 << 20)
    monkeypatch.setattr(disk.read_speed, "__defaults__", (0.01, None))


def told(crisp: Callable, folder: Path, *options: object) -> dict[str, dict[str, Any]]:
    done = crisp("doctor", "--dir", folder, "--json", "-", *options)
    assert done.code == 0, done.err
    return {finding["what"]: finding for finding in json.loads(done.out)}


def test_everything_has_a_line_and_what_is_missing_a_remedy(
    crisp: Callable, tmp_path: Path
) -> None:
    found = told(crisp, tmp_path)
    assert [what for what in found if what.split()[0] != "gpu"] == [
        "python", "cpu", "memory", *(f"device {name}" for name in DEVICES), "O_DIRECT",
        "asynchronous reads", "read speed",
        *(f"meter {meter.name}" for meter in telemetry.meters()),
        *(f"extra {extra}" for extra in EXTRAS),
    ]  # fmt: skip
    for finding in found.values():
        assert finding["ok"] or finding["remedy"], finding
        assert not (finding["ok"] and finding["remedy"]), finding
    for name in DEVICES:
        assert found[f"device {name}"]["meter"] == telemetry.meter_for(name).name
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
    assert "O_DIRECT must work" in found["asynchronous reads"]["remedy"]
    assert found["read speed"]["direct"] is False
    assert "through the page cache" in found["read speed"]["found"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_memory_is_no_disk(
    crisp: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("hw.store.disk", "hw.store.file_system"):
        monkeypatch.setattr(f"crisp.{module}.memory_file_system", lambda path: "tmpfs")
    found = told(crisp, tmp_path)
    assert not found["O_DIRECT"]["ok"]
    assert found["O_DIRECT"]["found"] == f"{tmp_path}: lies in memory (tmpfs), not on a disk"
    assert not found["read speed"]["ok"]
    assert "/s of memory (tmpfs), not of a disk, " in found["read speed"]["found"]
    assert found["read speed"]["memory_file_system"] == "tmpfs"


def test_a_system_without_asynchronous_reads(
    crisp: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crisp.hw.store.aio._CALLS", {})
    found = told(crisp, tmp_path)["asynchronous reads"]
    assert found["found"] == f"{tmp_path}: not to be had; the reading thread begins them"
    assert "fs.aio-max-nr" in found["remedy"]


def test_a_full_disk_is_a_finding(
    crisp: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(dir: Path, buffering: int) -> Any:
        return Path("/dev/full").open("wb", buffering=buffering)

    monkeypatch.setattr(disk.tempfile, "TemporaryFile", full)
    found = told(crisp, tmp_path)
    for what in ("O_DIRECT", "asynchronous reads", "read speed"):
        assert not found[what]["ok"]
        assert found[what]["found"] == f"{tmp_path}: No space left on device"
        assert "--dir" in found[what]["remedy"]
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_named_with_its_command(
    crisp: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crisp.cli.commands.run.doctor.find_spec", lambda module: None)
    found = told(crisp, tmp_path)
    assert found["extra jetson"]["found"] == "jetson-stats is missing"
    assert found["extra jetson"]["missing"] == ["jetson-stats"]
    assert found["extra jetson"]["remedy"] == "pip install '.[jetson]' in the checkout"
    assert found["device cpu"]["found"] == "needs torch"


class Cuda:
    """What torch knows of a machine with these GPUs."""

    def __init__(self, *gpus: SimpleNamespace) -> None:
        self.gpus = gpus

    def is_available(self) -> bool:
        return bool(self.gpus)

    def device_count(self) -> int:
        return len(self.gpus)

    def get_device_properties(self, number: int) -> SimpleNamespace:
        return self.gpus[number]


def torch_of(*gpus: SimpleNamespace, cuda: str | None = "12.8") -> SimpleNamespace:
    return SimpleNamespace(
        __version__="2.13.0", version=SimpleNamespace(cuda=cuda), cuda=Cuda(*gpus)
    )


@pytest.fixture
def has_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Lets doctor find this module as torch, and all others that it asks for; three devices."""
    monkeypatch.setattr("crisp.cli.commands.run.doctor.find_spec", lambda module: module)
    monkeypatch.setattr(options, "DEVICES", ("cpu", "cuda", "unified"))

    def give(torch: Any) -> None:
        def need(module: str) -> Any:
            if isinstance(torch, Exception):
                raise torch
            return torch

        monkeypatch.setattr("crisp.extras.import_extra", need)

    return give


def test_gpus_as_torch_sees_them(crisp: Callable, tmp_path: Path, has_torch: Callable) -> None:
    card = SimpleNamespace(
        name="NVIDIA GeForce RTX 4090", total_memory=25_300_000_000, major=8, minor=9,
        multi_processor_count=128, uuid="1a-2b", is_integrated=0,
    )  # fmt: skip
    board = SimpleNamespace(
        name="Orin", total_memory=32_000_000_000, major=8, minor=7, multi_processor_count=14,
        is_integrated=1,
    )  # fmt: skip
    has_torch(torch_of(card, board))
    found = told(crisp, tmp_path)
    assert found["gpu 0"]["found"] == (
        "NVIDIA GeForce RTX 4090, 25.3 GB of memory, its own; compute capability 8.9, 128 "
        "multiprocessors; torch 2.13.0, for CUDA 12.8"
    )
    assert (found["gpu 0"]["uuid"], found["gpu 0"]["capability"]) == ("1a-2b", "8.9")
    assert "32 GB of memory, shared with the processor;" in found["gpu 1"]["found"]
    assert found["gpu 1"]["uuid"] is None
    for name in ("cpu", "cuda", "unified"):
        assert found[f"device {name}"]["ok"]


@pytest.mark.parametrize(
    ("torch", "why", "remedy"),
    [
        (torch_of(cuda=None), "torch 2.13.0 is built without CUDA", "a build for CUDA"),
        (torch_of(), "torch 2.13.0, for CUDA 12.8, sees none", "nvidia-smi"),
        (OSError("libcudart.so: no such file"), "cannot be imported: libcudart.so", "anew"),
    ],
)
def test_a_torch_that_sees_no_gpu_is_told_with_a_remedy(
    crisp: Callable, tmp_path: Path, has_torch: Callable, torch: Any, why: str, remedy: str
) -> None:
    has_torch(torch)
    found = told(crisp, tmp_path)
    assert why in found["gpu"]["found"]
    assert remedy in found["gpu"]["remedy"]
    for name in ("cuda", "unified"):
        assert found[f"device {name}"]["found"] == "needs a GPU"
        assert found[f"device {name}"]["remedy"] == "torch must see it: see gpu"
    assert found["device cpu"]["ok"]


def test_what_every_meter_says_and_whose_joules_a_device_has(
    crisp: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Locked(FakeMeter):
        name = "locked"

        def probe(self) -> Probe:
            return Probe(self.name, "permission denied", "sudo it")

    pytest.importorskip("torch")
    meters = {"cpu": Locked(), "cuda": FakeMeter(), "unified": FakeMeter()}
    monkeypatch.setattr(telemetry, "meters", lambda: (meters["cpu"], meters["cuda"]))
    monkeypatch.setattr(telemetry, "meter_for", meters.__getitem__)
    found = told(crisp, tmp_path)
    assert found["meter fake"]["found"] == "readable: fake"
    assert found["meter locked"]["found"] == "permission denied"
    assert found["meter locked"]["remedy"] == "sudo it"
    assert found["device cpu"]["meter"] == "locked"
    assert found["device cpu"]["found"].endswith("; joules by locked, which cannot be read")


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
    for flags, line in (
        (("--dir", tmp_path / "no"), f"error: --dir {tmp_path / 'no'}: is no folder"),
        (("--store", tmp_path), f"error: {tmp_path}: lacks store.json"),
    ):
        done = crisp("doctor", *flags)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(line)


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    def writing(process: int) -> bool:
        """It has a file there; one without a name is a link to ``DIR/#NUMBER (deleted)``."""
        for link in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):  # closed since
                if str(link.readlink()).startswith(f"{tmp_path}/"):
                    return True
        return False

    assert interrupted(["doctor"], tmp_path, writing) == "interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_torch_is_never_imported(tmp_path: Path) -> None:
    """As where it is not installed."""
    program = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "from crisp.hw.store import disk; disk.FILE_BYTES = 1 << 20\n"
        "import crisp.cli.commands.run.doctor as own; own.find_spec = lambda module: None\n"
        "from crisp.cli.main import main; main(['doctor'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--  extra hf" in done.stdout
