"""MXFP4 as gpt-oss publishes it: 4-bit floats, an 8-bit power of two for each 32 along the input.

``X_blocks`` [experts, out, in / 32, 16] has two numbers a byte, the low half first, ``X_scales``
[experts, out, in / 32] the exponents. The plain weight ``X`` is [experts, in, out].
"""

from __future__ import annotations

import numpy as np

from crisp.checkpoint.quantised.axes import AxisOrder, take, take_halves
from crisp.checkpoint.quantised.numbers import E2M1, Floats, pair_words, powers_of_two
from crisp.checkpoint.quantised.weight import Parts, Quantisation, QuantisedWeight, StoredTensors

_GROUP = 32
# both numbers of a byte
_PAIRS = pair_words(np.tile(E2M1, 16), np.repeat(E2M1, 16))


def find(stored: StoredTensors) -> Quantisation:
    """Return all weights in MXFP4; CrispError for blocks without scales, or of another shape."""
    weights = []
    for base, blocks in stored.ending("_blocks"):
        stored.need(blocks.name, f"{base}_scales")
        shape = blocks.shape
        if blocks.dtype != "U8" or len(shape) != 4 or shape[-1] != _GROUP // 2:
            raise stored.wrong(blocks.name, f"U8 [experts, out, in / {_GROUP}, {_GROUP // 2}]")
        stored.check(f"{base}_scales", ("U8", "F8_E8M0"), shape[:-1])
        weights.append(
            QuantisedWeight(
                base,
                (shape[0], shape[2] * _GROUP, shape[1]),
                {"blocks": blocks.name, "scales": f"{base}_scales"},
                decode,
                stacked=True,
                axes=(
                    AxisOrder(
                        _GROUP,
                        {
                            "blocks": take_halves(shape[2] * _GROUP, 1, high_first=False),
                            "scales": take(1, _GROUP),
                        },
                    ),
                    AxisOrder(1, {"blocks": take(0), "scales": take(0)}),
                ),
            )
        )
    return Quantisation(weights)


def decode(parts: Parts) -> Floats:
    """Return one expert's weight [in, out], a view of [out, in]."""
    blocks, scales = parts["blocks"].bits, powers_of_two(parts["scales"].bits)
    numbers = _PAIRS[blocks].view(np.float32).reshape(*scales.shape, _GROUP)  # [out, in / 32, 32]
    numbers *= scales[..., None]
    return numbers.reshape(len(blocks), -1).T
