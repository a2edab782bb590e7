"""The header of a GGUF file: its fields, and where each tensor lies.

Nothing is allocated that the file is too short for; lists of texts (a tokenizer's) are passed over.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from crisp.errors import CrispError, reason_of
from crisp.files import check_readable

# Name, numbers of a block and its bytes, by ggml's number of a type
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip

_STRING, _ARRAY = 8, 9
_SCALARS = {  # struct's letter by GGUF's number of a type
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_KEPT = 65_536  # numbers of a list that is kept
_LONGEST_NAME = 65_535  # bytes, as the format allows for a key
_MOST_NUMBERS = 1 << 48  # of a tensor
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file."""

    name: str
    kind: str  # name of its type in TYPES
    shape: tuple[int, ...]  # rows first: the last axis is contiguous
    path: Path
    offset: int  # of its first byte in the file
    nbytes: int

    @property
    def where(self) -> str:
        """File and name, for messages."""
        return f"{self.path}: tensor {self.name!r}"


@dataclass(frozen=True, eq=False)
class GgufHeader:
    """The fields and tensors of a GGUF file, those of all its parts if it is split."""

    path: Path  # of the first part
    fields: Mapping[str, Any]  # without lists of texts
    tensors: Mapping[str, GgufTensor]


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file at ``path``, or the one in that folder if it holds nothing to prefer.

    A split file is named by its first part. None for what has none, or safetensors.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = sorted(path.glob("*.gguf"))
    first = [
        file for file in files if (m := _SPLIT.fullmatch(file.name)) is None or m[2] == "00001"
    ]
    if len(first) > 1:
        raise CrispError(
            f"{path}: holds {len(first)} GGUF files, such as {first[0].name}; name one"
        )
    return first[0] if first else None


def refuse_gguf(path: Path) -> None:
    """Raise CrispError for a GGUF file, or a folder of one, where a whole model is to be run."""
    if path.suffix == ".gguf" or (not (path / "config.json").exists() and gguf_file(path)):
        raise CrispError(
            f"{path}: is a GGUF model, of which crisp pack reads the experts; a transformers "
            "checkpoint was expected"
        )


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file and of its other parts.

    Raises CrispError for a file that is cut off, of another version or byte order, or whose counts
    and shapes cannot be, and for missing parts.
    """
    fields, tensors = _read_file(path)
    count = fields.get("split.count", 1)
    if type(count) is int and count > 1:
        split = _SPLIT.fullmatch(path.name)
        if split is None or int(split[3]) != count or int(split[2]) != 1:
            raise CrispError(
                f"{path}: is a part of a file split in {count}; the first, NAME-00001-of-"
                f"{count:05}.gguf, was expected"
            )
        for part in range(2, count + 1):
            other = path.with_name(f"{split[1]}-{part:05}-of-{count:05}.gguf")
            for tensor in _read_file(other)[1].values():
                if tensor.name in tensors:
                    raise CrispError(f"{tensor.where}: is in {tensors[tensor.name].path} as well")
                tensors[tensor.name] = tensor
    return GgufHeader(path, fields, tensors)


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Return the fields and tensors of one file."""
    if not path.exists():
        raise CrispError(f"{path}: is missing; a GGUF file was expected")
    check_readable(path)
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CrispError(f"{path}: is no GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(path, data).read()
    except (OSError, ValueError) as error:
        raise CrispError(f"{path}: cannot be read: {reason_of(error)}") from error


class _Cursor:
    """Reads one value after the other, and never beyond the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at, self._size = path, data, 4, len(data)

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        (version,) = self._numbers("I")
        if version not in (2, 3):
            raise CrispError(f"{self._path}: is GGUF of version {version}; 2 or 3 was expected")
        n_tensors, n_fields = self._numbers("QQ")
        self._check_count("tensors", n_tensors, 24)
        self._check_count("fields", n_fields, 13)
        fields = dict[str, Any]()
        for _ in range(n_fields):
            name = self._name()
            value = self._value(name)
            if value is not None:
                fields[name] = value
        infos = [self._tensor() for _ in range(n_tensors)]
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CrispError(
                f"{self._path}: general.alignment is {alignment!r}, a power of two was expected"
            )
        start = -(-self._at // alignment) * alignment
        tensors = dict[str, GgufTensor]()
        for name, kind, shape, offset, nbytes in infos:
            if name in tensors:
                raise CrispError(f"{self._path}: has the tensor {name!r} twice")
            end = start + offset + nbytes
            if offset % alignment:
                raise CrispError(
                    f"{self._path}: tensor {name!r} begins at byte {offset:,} of the data, no "
                    f"multiple of {alignment:,}: damaged"
                )
            if end > self._size:
                raise CrispError(
                    f"{self._path}: tensor {name!r} ends at byte {end:,}, and the file has "
                    f"{self._size:,}: cut off, or damaged"
                )
            tensors[name] = GgufTensor(name, kind, shape, self._path, start + offset, nbytes)
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for before, after in pairwise(in_order):
            if after.offset < before.offset + before.nbytes:
                raise CrispError(
                    f"{after.where} begins inside {before.name!r}, at byte {after.offset:,}: "
                    "damaged"
                )
        return fields, tensors

    def _numbers(self, letters: str) -> tuple[Any, ...]:
        """Read little-endian numbers, see `struct`."""
        layout = struct.Struct("<" + letters)
        return layout.unpack(self._take(layout.size))

    def _take(self, size: int) -> bytes:
        self._skip(size)
        return self._data[self._at - size : self._at]

    def _skip(self, size: int) -> None:
        if size > self._size - self._at:
            raise CrispError(
                f"{self._path}: is cut off: {self._size:,} bytes, and its header goes on"
            )
        self._at += size

    def _check_count(self, what: str, count: int, least: int) -> None:
        """Raise CrispError for more things of at least ``least`` bytes than the file can hold."""
        if count > (self._size - self._at) // least:
            raise CrispError(
                f"{self._path}: says {count:,} {what}, too many for its {self._size:,} bytes"
            )

    def _name(self) -> str:
        (length,) = self._numbers("Q")
        if length > _LONGEST_NAME:
            raise CrispError(f"{self._path}: a name of {length:,} bytes; cut off, or damaged")
        return self._take(length).decode("utf-8", "replace")

    def _value(self, name: str) -> Any:
        """Read a field's value; None for a list that is not kept."""
        (kind,) = self._numbers("I")
        if kind == _STRING:
            (length,) = self._numbers("Q")
            return self._take(length).decode("utf-8", "replace")
        if kind != _ARRAY:
            return self._numbers(self._letter(name, kind))[0]
        kind, count = self._numbers("IQ")
        if kind == _STRING:
            self._check_count(f"texts in {name}", count, 8)
            for _ in range(count):
                self._skip(self._numbers("Q")[0])
            return None
        letter = self._letter(name, kind)
        size = struct.calcsize(f"<{letter}")
        self._check_count(f"numbers in {name}", count, size)
        if count > _KEPT:
            self._skip(count * size)
            return None
        return list(self._numbers(f"{count}{letter}"))

    def _letter(self, name: str, kind: int) -> str:
        if kind not in _SCALARS:
            raise CrispError(f"{self._path}: {name!r} is of type {kind}, which is not understood")
        return _SCALARS[kind]

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int, int]:
        """Read (name, type, shape, offset, bytes) of a tensor."""
        name = self._name()
        (n_dims,) = self._numbers("I")
        if not 1 <= n_dims <= 8:
            raise CrispError(f"{self._path}: tensor {name!r} has {n_dims} axes; damaged")
        dims = self._numbers(f"{n_dims}Q")
        kind, offset = self._numbers("IQ")
        if kind not in TYPES:
            raise CrispError(
                f"{self._path}: tensor {name!r} is of ggml's type {kind}, which is not known here"
            )
        label, block, nbytes = TYPES[kind]
        numbers = math.prod(dims)
        if not 0 < numbers <= _MOST_NUMBERS or dims[0] % block:
            raise CrispError(
                f"{self._path}: tensor {name!r}: {list(reversed(dims))} is no shape of {label}"
            )
        return name, label, tuple(reversed(dims)), offset, numbers // block * nbytes
