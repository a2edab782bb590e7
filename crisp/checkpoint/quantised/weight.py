"""One weight of a model, and the stored tensors that it is made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from crisp.checkpoint.files import Checkpoint, TensorEntry
from crisp.checkpoint.quantised.axes import FIXED, Axes
from crisp.checkpoint.quantised.numbers import BITS_OF, Array, Floats, StoredPart
from crisp.checkpoint.streaming import ByteSource
from crisp.errors import CrispError

Parts = Mapping[str, StoredPart]
"""Stored tensors by what they are in the format, such as "qweight" or "scales"."""
Decode = Callable[[Parts], Floats]
"""Parts -> weight in float32. Of one expert where the weight is stacked: without its first axis."""


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A weight as a plain checkpoint would have it, [out, in] unless a family stores another."""

    name: str
    shape: tuple[int, ...]  # of the plain weight
    parts: Mapping[str, str]  # what a stored tensor is in the format -> its name
    decode: Decode
    stacked: bool = False  # the first axis of the weight and of every part counts experts
    axes: Axes = FIXED  # orders that its rows and columns can take, without the first axis


class Quantisation(NamedTuple):
    """What a format finds in a checkpoint."""

    weights: list[QuantisedWeight]
    unused: Collection[str] = ()  # stored tensors that weights do not need: scales of activations


class StoredTensors:
    """The stored tensors of a checkpoint, looked up with errors that name file and tensor."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.entries = checkpoint.tensors

    def ending(self, *suffixes: str) -> list[tuple[str, TensorEntry]]:
        """Return (name without the suffix, tensor) of all names that end in one of them."""
        return [
            (name.removesuffix(suffix), entry)
            for name, entry in self.entries.items()
            for suffix in suffixes
            if name.endswith(suffix)
        ]

    def need(self, owner: str, name: str) -> TensorEntry:
        """Return the tensor ``name``, which belongs to the tensor ``owner``."""
        if name not in self.entries:
            raise CrispError(f"{self.checkpoint.where(owner)}: has no {name!r} beside it")
        return self.entries[name]

    def check(self, name: str, dtypes: Collection[str], *shapes: tuple[int, ...]) -> TensorEntry:
        """Return the tensor; CrispError unless its type and shape are among the expected ones."""
        entry = self.entries[name]
        if entry.dtype not in dtypes or (shapes and entry.shape not in shapes):
            expected = " or ".join(str(list(shape)) for shape in shapes) or "any shape"
            raise CrispError(
                f"{self.checkpoint.where(name)}: is {entry.dtype} {list(entry.shape)}, expected "
                f"{' or '.join(dtypes)} {expected}"
            )
        return entry

    def matrix_shape(self, entry: TensorEntry) -> tuple[int, int]:
        """Return the two whole numbers that a tensor of two holds; they are read."""
        rows, columns = (int(n) for n in self.read_small(entry, ("I64", "I32"), 2))
        if not 0 < rows < 1 << 31 or not 0 < columns < 1 << 31:
            raise CrispError(
                f"{self.checkpoint.where(entry.name)}: [{rows}, {columns}] is no shape"
            )
        return rows, columns

    def read_small(self, entry: TensorEntry, dtypes: Collection[str], most: int) -> Array:
        """Read a tensor of at most ``most`` numbers, [n]."""
        if entry.dtype not in dtypes or math.prod(entry.shape) > most or not entry.nbytes:
            raise self.wrong(entry.name, f"at most {most} numbers of {' or '.join(dtypes)}")
        numbers = np.empty(math.prod(entry.shape), BITS_OF[entry.dtype])
        with ByteSource(self.checkpoint.folder / entry.shard) as source:
            source.read(numbers, entry.offset)
        return numbers

    def wrong(self, name: str, expected: str) -> CrispError:
        """Return the error for a tensor whose type or shape is not understood."""
        entry = self.entries[name]
        return CrispError(
            f"{self.checkpoint.where(name)}: is {entry.dtype} {list(entry.shape)}, expected "
            f"{expected}"
        )


def whole_number(
    config: Mapping[str, Any], key: str, where: str, default: int | None = None
) -> int:
    """Return a positive whole number of a quantization_config, or -1, which stands for "all"."""
    value = config.get(key, default)
    if type(value) is not int or (value < 1 and value != -1):
        raise CrispError(f"{where}: {key}: found {value!r}, expected a positive whole number or -1")
    return value
