"""Write a store: its folder appears when it is complete; after a failure nothing is left."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from crisp.checkpoint.streaming import open_new_file
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.files import check_new_folder
from crisp.hw.store.format import HASHES, VERSION, file_name, header, table_name
from crisp.model.spec import STORE_INDEX, ModelSpec
from crisp.units import format_bytes

SYNC = 1 << 26  # bytes after which data is flushed to the disk and dropped from the page cache
_PART = ".part"
_OWN = re.compile(rf"layer-\d+\.safetensors|{re.escape(HASHES)}|{re.escape(STORE_INDEX)}")

Bytes = npt.NDArray[np.uint8]


class StoreWriter:
    """Writes the files of a store into a folder."""

    def __init__(self, folder: Path, spec: ModelSpec, dtype: str, activation: str) -> None:
        self._folder, self._spec, self._kind = folder, spec, (dtype, activation)
        self._files: list[dict[str, Any]] = []
        self._tables: dict[str, npt.NDArray[np.uint64]] = {}

    def layer(self, layer: int, blocks: Iterable[Bytes]) -> None:
        """Write the file of a decoder layer.

        blocks: of all experts, one after the other, [stride] each; a block may change when the next
        one is asked for.
        """
        spec, hashed = self._spec, import_extra("xxhash").xxh3_64_intdigest
        table = np.zeros((spec.n_experts, spec.n_blocks), np.uint64)
        start = len(header(spec, layer, _digest(table), *self._kind))
        size = start + spec.n_experts * spec.expert_bytes
        path = self._folder / file_name(layer)
        with open_new_file(path) as file:
            os.posix_fallocate(file, 0, size)  # fails now if the disk is too full
            written = synced = start
            for place, block in zip(np.ndindex(table.shape), blocks, strict=True):
                table[place] = hashed(block.data)
                _write(file, block.data, written)
                written += block.nbytes
                if written - synced >= SYNC:
                    _to_disk(file)
                    synced = written
            first = header(spec, layer, _digest(table), *self._kind)
            _write(file, memoryview(first), 0)
            _to_disk(file)
        sums = hashlib.sha256(first).hexdigest()
        self._files.append(
            {"layer": layer, "name": path.name, "bytes": size, "header_sha256": sums}
        )
        self._tables[table_name(layer)] = table

    def finish(self, about: dict[str, Any]) -> None:
        """Write hashes and index. about: the index's fields besides geometry and files."""
        index = {"version": VERSION, "spec": self._spec.to_dict(), **about, "files": self._files}
        content = json.dumps(index, indent=1).encode() + b"\n"
        for name, data in ((HASHES, save(self._tables)), (STORE_INDEX, content)):
            with open_new_file(self._folder / name) as file:
                _write(file, memoryview(data), 0)
                _to_disk(file)


def check_new(out: Path) -> None:
    """Raise CrispError unless ``out`` is a new folder in an existing one, or an empty folder."""
    target = Path(os.path.realpath(out))
    if not target.parent.is_dir():
        raise CrispError(f"--out {out}: the folder {target.parent} does not exist")
    if not target.is_dir() or [path.name for path in target.iterdir()] != [_PART]:
        check_new_folder(out)


@contextmanager
def new_store(out: Path, spec: ModelSpec, dtype: str, activation: str) -> Iterator[StoreWriter]:
    """Yield a writer; what it has written is in ``out`` after the block, or not at all.

    Raises CrispError as `check_new` does, for a full disk, and while another process writes the
    same store.
    """
    check_new(out)
    target = Path(os.path.realpath(out))
    given = target.is_dir()  # it is kept: it may be a disk, or another process's working folder
    free = shutil.disk_usage(target if given else target.parent).free
    if spec.routed_bytes > free:
        needed = format_bytes(spec.routed_bytes)
        raise CrispError(f"--out {out}: {needed} are needed, {format_bytes(free)} are free")
    folder = target / _PART if given else target.with_name(f".{target.name}{_PART}")
    try:
        with _alone(folder):
            check_new(out)  # again: another process may have made it meanwhile
            yield StoreWriter(folder, spec, dtype, activation)
            if given:
                _move(folder, target)
            else:
                folder.replace(target)
        _sync_folder(target if given else target.parent)
    except OSError as error:
        if error.filename and not Path(error.filename).is_relative_to(folder):
            raise
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or error
        raise CrispError(f"--out {out}: cannot be written: {reason}") from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Create and lock the folder for this process; remove it after a failure.

    What a killed process left there is removed first. Raises CrispError for anything else that is
    in its place.
    """
    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            still = os.path.samestat(os.fstat(lock), folder.lstat())
        except (BlockingIOError, FileNotFoundError):
            still = False
        if not still:  # else it may have become a store, or another's folder, before it was locked
            raise CrispError(f"{folder}: another process is packing there")
        left = list(folder.iterdir())
        if not all(_OWN.fullmatch(path.name) for path in left):
            raise CrispError(f"{folder}: is in the way, and was not left by crisp pack")
        for path in left:
            path.unlink()
        try:
            yield
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _move(folder: Path, target: Path) -> None:
    """Move all files, the index last; remove them if that fails."""
    paths = sorted(folder.iterdir(), key=lambda path: path.name == STORE_INDEX)
    try:
        for path in paths:
            path.replace(target / path.name)
        folder.rmdir()
    except BaseException:
        for path in paths:
            (target / path.name).unlink(missing_ok=True)
        raise


def _digest(table: npt.NDArray[np.uint64]) -> str:
    """Return the sha256 of a layer's hashes."""
    return hashlib.sha256(table.tobytes()).hexdigest()


def _write(file: int, data: memoryview, offset: int) -> None:
    """Write all bytes at a place of a file."""
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _to_disk(file: int) -> None:
    """Flush what was written to the disk, and drop it from the page cache if possible."""
    os.fsync(file)
    with suppress(OSError):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
