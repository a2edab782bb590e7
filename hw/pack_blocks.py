"""What is written, block by block: from an expert that was read, or from random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from crisp.errors import CrispError
from crisp.model import ModelSpec
from hw.pack_numbers import NAMES, UNSIGNED, Array, all_finite, converted
from hw.pack_reading import Expert, Reader
from hw.pack_writer import Bytes

_TILE = 32  # rows of a matrix that is turned: the lines of a tile stay in a core's cache
_SHIFTS = 1 << 20  # positions at which a block's random numbers may begin
_APART = 7919  # by how many they begin after the previous block's; prime to the above


class _Buffer:
    """One block in the making: its bytes, and its parts as views of unsigned numbers."""

    def __init__(self, spec: ModelSpec, dtype: str) -> None:
        self.data: Bytes = np.zeros(spec.block_bytes, np.uint8)
        numbers = self.data.view(UNSIGNED[NAMES[dtype]])
        matrices, biases = 3 * spec.block * spec.d_model, 2 * spec.block * spec.biases
        self.matrices = numbers[:matrices].reshape(3, spec.block, spec.d_model)
        self.biases = numbers[matrices : matrices + biases].reshape(-1, spec.block)  # [2 or 0, ...]
        self.used = numbers[: matrices + biases]

    def end(self, rows: int) -> Bytes:
        """All bytes, with zeros behind the first ``rows`` neurons."""
        self.matrices[:, rows:] = 0
        self.biases[:, rows:] = 0
        return self.data


def blocks_of(reader: Reader, spec: ModelSpec, layer: int, dtype: str) -> Iterator[Bytes]:
    """The blocks of a layer's experts, [stride] each; valid until the next is asked for.

    Raises CrispError for weights that ``dtype`` cannot hold.
    """
    cutter = _Cutter(spec, reader.kind, dtype)
    for e in range(spec.n_experts):
        # nothing here holds an expert while the next one is read
        yield from cutter.blocks(reader.expert(layer, e), f"layer {layer}: expert {e}")


class _Cutter:
    """Cuts experts of numbers of one type into blocks of another."""

    def __init__(self, spec: ModelSpec, kind: str, dtype: str) -> None:
        self._spec, self._kind, self._dtype = spec, kind, dtype
        self._buffer = _Buffer(spec, dtype)
        self._turned = np.empty((spec.block, spec.d_model), UNSIGNED[kind])

    def blocks(self, expert: Expert, who: str) -> Iterator[Bytes]:
        """See `blocks_of`; ``who`` names the expert."""
        buffer, kind, target = self._buffer, self._kind, NAMES[self._dtype]
        for first in range(0, self._spec.d_ff, self._spec.block):
            own = slice(first, min(first + self._spec.block, self._spec.d_ff))
            rows = own.stop - own.start
            turned = self._turned[:rows]
            for matrix, into in zip(expert.matrices, buffer.matrices, strict=True):
                _turn(matrix[own], turned)
                into[:rows] = converted(turned, kind, target)
            for bias, into in zip(expert.biases, buffer.biases, strict=True):
                into[:rows] = converted(bias[own], kind, target)
            data = buffer.end(rows)
            if kind != target and not all_finite(buffer.used, target):
                raise CrispError(
                    f"{who} has weights too large for {self._dtype}; --dtype fp32 or bf16 was "
                    "expected"
                )
            yield data


def _turn(matrix: Array, into: Array) -> None:
    """Copy [rows, columns], whichever of the two lies together in memory."""
    if matrix.strides[1] == matrix.itemsize:
        into[:] = matrix
        return
    for column in range(0, matrix.shape[1], _TILE):
        into[:, column : column + _TILE] = matrix[:, column : column + _TILE]


class RandomBlocks:
    """Blocks of normal numbers, of a standard deviation of 1 / sqrt(inputs of the matrix): an
    expert's outputs are about as large as its inputs.

    All are cut from the same numbers, which makes them as fast as they can be copied. They begin
    elsewhere in every block, so that the first 2**20 blocks differ; what is gate in one block is up
    in none of its neighbours.
    """

    def __init__(self, spec: ModelSpec, dtype: str, seed: int) -> None:
        self._spec, self._buffer = spec, _Buffer(spec, dtype)
        drawn = np.random.default_rng(seed).standard_normal(
            _SHIFTS + spec.block * spec.d_model, np.float32
        )

        def scaled(inputs: int) -> Array:
            numbers = (drawn / np.float32(math.sqrt(inputs))).view(np.uint32)
            return converted(numbers, "F32", NAMES[dtype])

        inward, outward = scaled(spec.d_model), scaled(spec.d_ff)
        self._numbers = (inward, inward, outward)
        self._made = 0

    def layer(self, advance: Callable[[int], None]) -> Iterator[Bytes]:
        """The blocks of the next layer, [stride] each; valid until the next is asked for.

        advance: told how many more bytes are made.
        """
        spec, buffer = self._spec, self._buffer
        for _ in range(spec.n_experts):
            for block in range(spec.n_blocks):
                rows = spec.neurons(block, block + 1)
                for part, into in enumerate(buffer.matrices):
                    self._fill(part, into[:rows])
                for part, into in enumerate(buffer.biases):
                    self._fill(part, into[:rows])
                self._made += 1
                yield buffer.end(rows)
                advance(spec.block_bytes)

    def _fill(self, part: int, into: Array) -> None:
        begin = (self._made * _APART + part * _SHIFTS // 3) % _SHIFTS
        into[:] = self._numbers[part][begin : begin + into.size].reshape(into.shape)
