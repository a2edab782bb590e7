"""8-bit floats with scales in float: one for a tensor, for each output, or for each block.

``X`` is E4M3 (or E5M2), and ``X_scale_inv`` (as DeepSeek publishes it) or ``X_scale`` what its
numbers are multiplied by, in spite of the first name. Experts may be stacked along a first axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from crisp.checkpoint.quantised.axes import Axes, AxisOrder, take
from crisp.checkpoint.quantised.numbers import Floats
from crisp.checkpoint.quantised.weight import Parts, Quantisation, QuantisedWeight, StoredTensors
from crisp.errors import CrispError
from crisp.model.fields import Fields

FLOATS8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("_scale_inv", "_scale")
_SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")
_ACTIVATIONS = (
    ".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".q_scale", ".output_scale",
    ".input_scale_ub", "_input_scale", "_activation_scale",
)  # fmt: skip


def find(stored: StoredTensors, config: Mapping[str, Any], where: str) -> Quantisation:
    """Return all weights in 8-bit floats; CrispError for one without a scale that fits."""
    block = Fields(where, config).sides("weight_block_size")
    weights = []
    for name, entry in stored.entries.items():
        if entry.dtype not in FLOATS8:
            continue
        scale = next((name + s for s in _SCALES if name + s in stored.entries), None)
        if scale is None:
            raise CrispError(f"{stored.checkpoint.where(name)}: has no scale beside it")
        weights.append(scaled_weight(stored, name, scale, block))
    return Quantisation(weights, activation_scales(stored))


def activation_scales(stored: StoredTensors) -> list[str]:
    """Return the names of scales of activations, which are not quantised here."""
    return [name for name in stored.entries if name.endswith(_ACTIVATIONS)]


def scaled_weight(
    stored: StoredTensors, name: str, scale: str, block: tuple[int, int] | None
) -> QuantisedWeight:
    """Return the weight ``name`` [..., out, in] times its scale, spread as its shape says.

    block: rows and columns of a block, where the config says it.
    """
    entry, scales = stored.entries[name], stored.check(scale, _SCALE_TYPES)
    if len(entry.shape) not in (2, 3):
        raise stored.wrong(name, "a matrix, or one of each expert")
    stacked = len(entry.shape) == 3
    grid = _grid(entry.shape, scales.shape, stacked, block)
    if grid is None:
        raise stored.wrong(scale, f"a scale of {list(entry.shape)}, of its rows or of its blocks")
    return QuantisedWeight(
        name,
        entry.shape,
        {"weight": name, "scale": scale},
        partial(decode, grid=grid),
        stacked=stacked,
        axes=_axes(entry.shape[-2:], grid),
    )


def _axes(shape: tuple[int, ...], grid: tuple[int, int]) -> Axes:
    """Return how rows and columns can be ordered, whose scales lie in a grid."""
    rows, columns = (AxisOrder(1, {"weight": take(axis)}) for axis in (0, 1))
    if grid[0] < shape[0]:
        rows = AxisOrder(grid[0], {"weight": take(0), "scale": take(0, grid[0])})
    if grid[1] < shape[1]:
        columns = AxisOrder(grid[1], {"weight": take(1), "scale": take(1, grid[1])})
    return rows, columns


def _grid(
    shape: tuple[int, ...],
    scales: tuple[int, ...],
    stacked: bool,
    block: tuple[int, int] | None,
) -> tuple[int, int] | None:
    """Return rows and columns that share a scale; None for scales that do not fit."""
    if stacked:
        if not scales or scales[0] != shape[0]:
            return None
        shape, scales = shape[1:], scales[1:]
    out, inputs = shape
    if all(n == 1 for n in scales) and len(scales) <= 2:
        return out, inputs
    if scales in ((out,), (out, 1)):
        return 1, inputs
    if len(scales) != 2:
        return None
    # Published blocks are those of the config: the last of a row or column may be shorter.
    # Without a word about them they divide the matrix evenly.
    if block is None:
        if out % scales[0] or inputs % scales[1]:
            return None
        block = out // scales[0], inputs // scales[1]
    rows, columns = block
    return (rows, columns) if (-(-out // rows), -(-inputs // columns)) == scales else None


def decode(parts: Parts, grid: tuple[int, int]) -> Floats:
    """Return weight [out, in]; grid: rows and columns that share a scale."""
    weight, scale = parts["weight"].floats(), parts["scale"].floats()
    return multiply_by_blocks(weight, scale, grid)


def multiply_by_blocks(weight: Floats, scale: Floats, grid: tuple[int, int]) -> Floats:
    """Multiply a matrix in place by one scale for each block of ``grid`` rows and columns.

    The last block of a row or column may be shorter.
    """
    rows, columns = grid
    out, inputs = weight.shape
    scale = scale.reshape(-(-out // rows), -(-inputs // columns))
    if columns == inputs and rows == 1:
        weight *= scale
        return weight
    for i, of_row in enumerate(scale):
        band = weight[i * rows : (i + 1) * rows]
        for j, factor in enumerate(of_row):
            band[:, j * columns : (j + 1) * columns] *= factor
    return weight
