"""The layout of a block's numbers in its slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from crisp.model import quantization

if TYPE_CHECKING:
    from crisp.hw.store.reader import Store

BITS = {"fp32": 32, "fp16": 16, "bf16": 16} | quantization.BITS
"""Bits of a weight, without its share of a scale, by the store's dtype."""


@dataclass(frozen=True)
class BlockLayout:
    """The parts of a slot: gate, up and down rows [block, d_model], biases [2, block], scales.

    The scales are [3, block, d_model / 64] float16 in int8 and int4, which have float16 biases;
    other stores have no scales, and biases of their own dtype. Experts without a gate have no part
    of it: two matrices, one bias. Bytes behind these are never read.
    """

    d_model: int
    block: int  # neurons of a full block
    stride: int  # bytes from slot to slot
    dtype: str  # a key of BITS
    activation: str  # as `crisp.model.activation.Activation` spells it
    biases: bool
    matrices: int = 3  # 2 without a gate

    @classmethod
    def of(cls, store: Store) -> BlockLayout:
        """Return the layout of a store's blocks."""
        spec = store.spec
        return cls(
            spec.d_model, spec.block, spec.block_bytes, store.dtype, store.activation, spec.biases,
            spec.matrices,
        )  # fmt: skip

    @property
    def bits(self) -> int:
        """Bits of one weight, without its share of a scale."""
        return BITS[self.dtype]

    @property
    def quantized(self) -> bool:
        """Whether weights are integers with scales."""
        return self.dtype in quantization.BITS

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one matrix."""
        return self.block * self.d_model * self.bits // 8

    @property
    def biases_at(self) -> int:
        """The byte of a slot at which biases begin, if there are any."""
        return self.matrices * self.matrix_bytes

    @property
    def scales_at(self) -> int:
        """The byte of a slot at which scales begin, if there are any."""
        return self.biases_at + (2 * self.block * (self.matrices - 1) if self.biases else 0)
