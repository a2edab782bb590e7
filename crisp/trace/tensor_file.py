"""The container of a trace: a safetensors file whose tensors are memory-mapped."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from crisp.errors import CrispError, reason_of
from crisp.files import check_readable

Array = npt.NDArray[Any]
Layout = Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]]  # name -> (type, shape)

_DTYPES = {"I32": np.int32, "I16": np.int16, "F16": np.float16, "U8": np.uint8}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class MappedTensors:
    """A safetensors file as arrays that are views of the mapped file."""

    metadata: dict[str, str]
    arrays: dict[str, Array]
    memory: mmap.mmap

    def release(self) -> None:
        """Drop the pages touched so far from this process, to bound the memory of a long walk.

        They remain in the system's file cache, changes included, and come back when touched.
        """
        self.memory.madvise(mmap.MADV_DONTNEED)


def read(path: Path) -> MappedTensors:
    """Map the file at ``path``; the arrays are read-only.

    Raises CrispError if there is no such file, it is not safetensors, is cut off, or holds types
    that no trace has.
    """
    if not path.is_file():
        raise CrispError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    check_readable(path)
    try:
        with safe_open(path, framework="numpy") as checked:  # its parser refuses hostile headers
            metadata = checked.metadata() or {}
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (SafetensorError, OSError) as error:
        raise CrispError(f"{path}: not a whole safetensors file ({reason_of(error)})") from error
    size = int.from_bytes(memory[:8], "little")
    entries = json.loads(memory[8 : 8 + size])
    entries.pop("__metadata__", None)
    arrays = {}
    for name, entry in entries.items():
        if entry["dtype"] not in _DTYPES:
            raise CrispError(f"{path}: tensor '{name}' is {entry['dtype']}: not a routing trace")
        start = 8 + size + entry["data_offsets"][0]
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        arrays[name] = _view(memory, dtype, tuple(entry["shape"]), start)
    return MappedTensors(metadata, arrays, memory)


def create(path: Path, metadata: Mapping[str, str], layout: Layout) -> MappedTensors:
    """Create a file of the given tensors, all zero, and map it for writing.

    The disk space is allocated first, so that a full disk is an OSError here and not a crash later.
    """
    # Widest types first: then every tensor starts on a multiple of its item size.
    tensors = {name: (np.dtype(dtype), shape) for name, (dtype, shape) in layout.items()}
    names = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offsets, end = {}, 0
    for name in names:
        dtype, shape = tensors[name]
        offsets[name], end = end, end + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        entry = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (offsets[name], end)}
        entries[name] = entry
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb+") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.flush()
        data = 8 + len(header)
        os.posix_fallocate(file.fileno(), 0, data + end)
        memory = mmap.mmap(file.fileno(), data + end)
    arrays = {name: _view(memory, *tensors[name], data + offsets[name]) for name in names}
    return MappedTensors(dict(metadata), arrays, memory)


def _view(memory: mmap.mmap, dtype: np.dtype[Any], shape: tuple[int, ...], start: int) -> Array:
    """Return the array of this shape that begins at byte ``start``."""
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(memory, dtype, count, start).reshape(shape)
