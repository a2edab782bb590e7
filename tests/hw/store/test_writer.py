"""Where a store is written, and who else may be writing there."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crisp.errors import CrispError
from crisp.hw.store import writer as pack_writer
from crisp.hw.store.packing import pack, pack_synthetic
from crisp.hw.store.reader import Store
from crisp.hw.store.writer import check_new, new_store
from crisp.model.spec import STORE_INDEX, ModelSpec

pytest.importorskip("xxhash")

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "traces" / "tiny-mixtral"
SPEC = ModelSpec.from_config(MODEL).first_layers(2)


@pytest.fixture
def given(tmp_path: Path) -> Iterator[Path]:
    """An empty folder of an unusual mode, in one where nothing else may be made."""
    folder = tmp_path / "parent" / "store"
    folder.mkdir(parents=True)
    folder.chmod(0o2750)
    yield folder
    assert [path.name for path in folder.parent.iterdir()] == ["store"]


def test_an_empty_folder_is_filled_as_it_is(given: Path) -> None:
    before = given.stat()
    store = pack_synthetic(SPEC, given)
    assert (given.stat().st_ino, given.stat().st_mode) == (before.st_ino, before.st_mode)
    assert len(list(given.iterdir())) == 2 + len(store.files)
    assert Store.open(given).digest == store.digest


def test_the_present_folder_is_filled(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(given)
    pack_synthetic(SPEC, Path())
    assert Path(STORE_INDEX).is_file()
    with pytest.raises(CrispError, match=r"--out \.: is not empty; a new folder was expected"):
        pack_synthetic(SPEC, Path())


@pytest.mark.parametrize("where", ["new", "given"])
@pytest.mark.parametrize("when", ["writing", "moving"])
def test_a_failure_leaves_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, when: str
) -> None:
    out = tmp_path / "store"
    if where == "given":
        out.mkdir()
    replace = Path.replace

    def broken(path: Path, target: Path) -> Path:
        if path.name in (STORE_INDEX, ".store.part"):
            raise KeyboardInterrupt
        return replace(path, target)

    if when == "moving":
        monkeypatch.setattr(Path, "replace", broken)
        with pytest.raises(KeyboardInterrupt):
            pack_synthetic(SPEC, out)
    else:
        with pytest.raises(KeyboardInterrupt), new_store(out, SPEC, "bf16", "silu"):
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == ([out] if where == "given" else [])
    assert where == "new" or list(out.iterdir()) == []


def test_what_was_killed_in_a_given_folder_goes(given: Path) -> None:
    (given / ".part").mkdir()
    (given / ".part" / "layer-099.safetensors").write_bytes(b"half")
    assert pack_synthetic(SPEC, given).path == given
    assert not (given / ".part").exists()


def test_the_room_is_that_of_the_folders_own_disk(
    given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Path]()

    def usage(path: Path) -> object:
        asked.append(path)
        return type("Usage", (), {"free": 10})

    monkeypatch.setattr("shutil.disk_usage", usage)
    with pytest.raises(CrispError, match="10 B are free"):
        pack_synthetic(SPEC, given)
    assert asked == [given]


def test_a_folder_that_went_before_it_was_locked_is_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process was there first: its folder became the store, and a third made a new one."""
    out, part = tmp_path / "store", tmp_path / ".store.part"
    lock = fcntl.flock

    def late(file: int, how: int) -> None:
        part.rename(out)
        if third:
            part.mkdir()
            (part / "layer-000.safetensors").write_bytes(b"the third's")
        lock(file, how)

    monkeypatch.setattr(pack_writer.fcntl, "flock", late)
    for third in (False, True):
        with pytest.raises(CrispError, match=r"\.store\.part: another process is packing there"):
            pack_synthetic(SPEC, out)
        assert part.exists() == third
        out.rmdir()
    assert (part / "layer-000.safetensors").read_bytes() == b"the third's"


def test_a_store_that_another_has_finished_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, lock = tmp_path / "store", fcntl.flock

    def late(file: int, how: int) -> None:
        out.mkdir()
        (out / STORE_INDEX).write_text("another's")
        lock(file, how)

    monkeypatch.setattr(pack_writer.fcntl, "flock", late)
    with pytest.raises(CrispError, match="is not empty; a new folder was expected"):
        pack_synthetic(SPEC, out)
    assert list(tmp_path.iterdir()) == [out]
    assert (out / STORE_INDEX).read_text() == "another's"


def test_mistakes_are_told_before_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("torch and transformers are imported")

    monkeypatch.setattr("crisp.hw.store.packing.locate_experts", never)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "letter.txt").touch()
    for out, how, words in [
        (tmp_path / "taken", {}, "is not empty"),
        (tmp_path / "no" / "store", {}, "no does not exist"),
        (tmp_path / "store", {"block": 321}, "block is 321, expected at most 320"),
        (tmp_path / "store", {"block": 0}, "block is 0, expected at least 1"),
        (tmp_path / "store", {"dtype": "fp8"}, "--dtype fp8: expected"),
    ]:
        with pytest.raises(CrispError, match=words):
            pack(MODEL, out, **how)  # type: ignore[arg-type]
    check_new(tmp_path / "store")


def test_three_at_once_make_one_store(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "crisp", "pack", "--synthetic", str(MODEL), "--out"]
    out = tmp_path / "store"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen([*line, str(out)], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    ends = sorted((process.wait(60), process.communicate()[1]) for process in running)
    assert [code for code, _ in ends] == [0, 2, 2]
    for _, told in ends[1:]:
        assert "another process is packing there" in told or "is not empty" in told
    assert list(tmp_path.iterdir()) == [out]
    assert Store.open(out).spec.n_layers == 6
