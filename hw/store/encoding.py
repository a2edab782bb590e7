"""Encode experts as blocks: experts that were read from a checkpoint, or random ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from crisp.errors import CrispError
from crisp.hw.store.checkpoint_experts import Expert
from crisp.hw.store.dtypes import (
    NAMES,
    UNSIGNED,
    Array,
    all_finite,
    convert_bits,
    copy_rows,
    pack_bytes,
)
from crisp.hw.store.expert_source import ExpertSource
from crisp.hw.store.scale_fit import ScaleFit
from crisp.hw.store.writer import Bytes
from crisp.model.quantization import BITS, GROUP, quantize
from crisp.model.spec import ModelSpec

_SHIFTS = 1 << 20  # positions at which a block's random numbers may begin
_STEP = 7919  # positions from one block's begin to the next one's; coprime to _SHIFTS


class _Buffer:
    """The buffer of one block: its bytes, and its parts as views of unsigned numbers.

    Rows of matrices are bytes in int8 and int4, which alone have scales.
    """

    def __init__(self, spec: ModelSpec, dtype: str) -> None:
        self.data: Bytes = np.zeros(spec.block_bytes, np.uint8)
        self._used, self._quantised = 0, dtype in BITS
        self.kind = NAMES.get(dtype, "F16")  # type of biases and scales, and of float matrices
        number = UNSIGNED[self.kind]
        columns, groups = spec.d_model * BITS.get(dtype, 8) // 8, spec.d_model // GROUP
        whole, each = (np.uint8, groups) if self._quantised else (number, 0)
        self.matrices = self._part(whole, spec.matrices, spec.block, columns)
        self.biases = self._part(number, (spec.matrices - 1) * spec.biases, spec.block)
        self.scales = self._part(number, spec.matrices, spec.block, each)

    def _part(self, kind: Any, *shape: int) -> Array:
        """Return a view of the next part of the block."""
        begin = self._used
        self._used += math.prod(shape) * np.dtype(kind).itemsize
        part: Array = self.data[begin : self._used].view(kind)
        return part.reshape(shape)

    def finite(self, kind: str) -> bool:
        """Return whether the block is finite; before encoding it was, and of type ``kind``."""
        if kind == self.kind and not self._quantised:
            return True
        numbers = self.scales if self._quantised else self.matrices
        return all_finite(numbers, self.kind) and all_finite(self.biases, self.kind)

    def end(self, rows: int) -> Bytes:
        """Zero what is behind the first ``rows`` neurons; return all bytes of the block."""
        for part in (self.matrices, self.biases, self.scales):
            part[:, rows:] = 0
        return self.data


def _encode(numbers: Array, kind: str, dtype: str) -> tuple[Array, Array]:
    """Return rows of a block's matrix and of its scales, which are [..., 0] if not quantised.

    numbers: [..., d_model], finite, of type ``kind``.
    """
    if dtype in NAMES:
        return convert_bits(numbers, kind, NAMES[dtype]), numbers[..., :0]
    q, scales = quantize(convert_bits(numbers, kind, "F32").view(np.float32), dtype)
    return pack_bytes(q, dtype), scales.view(np.uint16)


def encode_blocks(
    reader: ExpertSource,
    spec: ModelSpec,
    layer: int,
    dtype: str,
    fit: ScaleFit | None = None,
) -> Iterator[Bytes]:
    """Yield the blocks of a layer's experts, [stride] each; valid until the next is asked for.

    fit: of int4's scales, where there are moments; it keeps the errors that are left. Raises
    CrispError for weights that ``dtype`` cannot hold.
    """
    encoder = _BlockEncoder(spec, reader.kind, dtype, layer, fit)
    for e in range(spec.n_experts):
        if fit is not None:
            fit.begin(layer)
        # no variable holds an expert while the next one is read
        yield from encoder.blocks(reader.expert(layer, e), f"layer {layer}: expert {e}")


class _BlockEncoder:
    """Cuts experts into blocks, and converts their numbers from one type to another."""

    def __init__(
        self, spec: ModelSpec, kind: str, dtype: str, layer: int, fit: ScaleFit | None
    ) -> None:
        self._spec, self._kind, self._dtype = spec, kind, dtype
        self._layer, self._fit = layer, fit
        self._buffer = _Buffer(spec, dtype)
        self._rows = np.empty((spec.block, spec.d_model), UNSIGNED[kind])

    def blocks(self, expert: Expert, name: str) -> Iterator[Bytes]:
        """Yield the blocks of an expert, see `encode_blocks`; ``name`` is for errors."""
        buffer, kind, dtype = self._buffer, self._kind, self._dtype
        for first in range(0, self._spec.d_ff, self._spec.block):
            neurons = slice(first, min(first + self._spec.block, self._spec.d_ff))
            n = neurons.stop - neurons.start
            rows = self._rows[:n]  # [n, d_model]
            for part, matrix in enumerate(expert.matrices):
                copy_rows(matrix[neurons], rows)
                down = part == len(expert.matrices) - 1
                buffer.matrices[part, :n], buffer.scales[part, :n] = self._encode(rows, down)
            for bias, into in zip(expert.biases, buffer.biases, strict=True):
                into[:n] = convert_bits(bias[neurons], kind, buffer.kind)
            data = buffer.end(n)
            if not buffer.finite(kind):
                raise CrispError(
                    f"{name} has weights too large for {dtype}; --dtype fp32 or bf16 was expected"
                )
            yield data

    def _encode(self, rows: Array, down: bool) -> tuple[Array, Array]:
        """Return rows of a matrix and of its scales; down: it is the down matrix."""
        if self._fit is None or self._dtype != "int4":
            return _encode(rows, self._kind, self._dtype)
        q, scales = self._fit.quantize(rows, self._kind, self._layer, down)
        return pack_bytes(q, self._dtype), scales.view(np.uint16)


class RandomBlocks:
    """Random blocks, with a standard deviation of 1 / sqrt(inputs of the matrix), so that an
    expert's outputs are about as large as its inputs.

    All blocks are cut from the same normal numbers, so making one costs no more than a copy. Each
    begins elsewhere in them, so that the first 2**20 blocks differ (2**16 if numbers are in
    groups), and the gate of one block is the up of none of its neighbours.
    """

    def __init__(self, spec: ModelSpec, dtype: str, seed: int) -> None:
        self._spec, self._buffer = spec, _Buffer(spec, dtype)
        each, self._shifts = (GROUP, _SHIFTS // 16) if dtype in BITS else (1, _SHIFTS)
        self._groups = self._shifts + spec.block * spec.d_model // each
        drawn = np.random.default_rng(seed).standard_normal(self._groups * each, np.float32)
        inward, outward = (
            (drawn / np.float32(math.sqrt(inputs))).view(np.uint32)
            for inputs in (spec.d_model, spec.d_ff)
        )
        rows = [_encode(numbers, "F32", dtype) for numbers in (inward, outward)]
        self._rows = [rows[0]] * (spec.matrices - 1) + [rows[1]]
        self._biases = convert_bits(inward, "F32", self._buffer.kind) if spec.biases else inward
        self._made = 0

    def layer(self, advance: Callable[[int], None]) -> Iterator[Bytes]:
        """Yield the blocks of the next layer, [stride] each; valid until the next is asked for.

        advance: called with the bytes that have been made since its last call.
        """
        spec, buffer = self._spec, self._buffer
        for _ in range(spec.n_experts):
            for block in range(spec.n_blocks):
                rows = spec.neurons(block, block + 1)
                for part, (numbers, scales) in enumerate(self._rows):
                    self._fill(part, numbers, buffer.matrices[part, :rows])
                    self._fill(part, scales, buffer.scales[part, :rows])
                for part, bias in enumerate(buffer.biases):
                    self._fill(part, self._biases, bias[:rows])
                self._made += 1
                yield buffer.end(rows)
                advance(spec.block_bytes)

    def _fill(self, part: int, source: Array, into: Array) -> None:
        """Copy this block's share of the random numbers into one of its parts."""
        first = (self._made * _STEP + part * self._shifts // 3) % self._shifts
        begin = first * (len(source) // self._groups)  # times the numbers of a group
        into[:] = source[begin : begin + into.size].reshape(into.shape)
