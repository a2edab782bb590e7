"""Where the numbers of a block lie in its slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from crisp.model import quantization as quantised

if TYPE_CHECKING:
    from crisp.hw.store.reader import Store

BITS = {"fp32": 32, "fp16": 16, "bf16": 16} | quantised.BITS
"""Of a weight, without its share of a scale, by the store's dtype."""


@dataclass(frozen=True)
class Layout:
    """A slot: gate, up and down rows [block, d_model], biases [2, block], scales, then nothing.

    The scales are [3, block, d_model / 64] float16 in int8 and int4, which have float16 biases;
    other stores have no scales, and biases of their own dtype. What follows is never read.
    """

    d_model: int
    block: int  # neurons of a full block
    stride: int  # bytes from slot to slot
    dtype: str  # a key of BITS
    activation: str  # silu, gelu or gpt_oss
    biases: bool

    @classmethod
    def of(cls, store: Store) -> Layout:
        """That of a store's blocks."""
        spec = store.spec
        return cls(
            spec.d_model, spec.block, spec.block_bytes, store.dtype, store.activation, spec.biases
        )

    @property
    def bits(self) -> int:
        """Of one weight, without its share of a scale."""
        return BITS[self.dtype]

    @property
    def quantised(self) -> bool:
        """Whether weights are whole numbers with scales."""
        return self.dtype in quantised.BITS

    @property
    def matrix_bytes(self) -> int:
        """Of each of the three."""
        return self.block * self.d_model * self.bits // 8

    @property
    def biases_at(self) -> int:
        """The byte of a slot at which biases would begin."""
        return 3 * self.matrix_bytes

    @property
    def scales_at(self) -> int:
        """The byte of a slot at which scales would begin."""
        return self.biases_at + (2 * self.block * 2 if self.biases else 0)
