"""Widths of the fewest bytes at a given loss, from the loss that each width was measured to cost.

An item is an expert in a role: the token's anchor, or beside it. Losses of items are taken to add
up, as those of few and small changes do. `crisp prepare --width-losses` measures them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy.widths.base import WidthPolicy, WidthTable, table_of
from crisp.profile import Profile

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Solver(WidthPolicy):
    """The fewest expected bytes at which perplexity grows by no more than ``loss``, by the sum."""

    profiled: ClassVar = True
    counted: ClassVar = True
    loss: Fraction = Fraction(1, 50)  # relative: 0.02 is 2 % more perplexity

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> WidthTable:
        """Solve for each expert's two widths; CrispError for losses not measured in these blocks.

        Roles are those of the measurement, told by the router's weight.
        """
        losses, counts = profile.width_losses, profile.role_counts
        if losses is None or counts is None:
            raise CrispError(
                "width solver: asks what each width costs, which was not measured; give the "
                "--metadata of crisp prepare --width-losses"
            )
        layers, experts, roles, widths = losses.shape
        if widths != spec.n_blocks + 1:
            raise CrispError(
                f"width solver: {spec.name} has {spec.n_blocks} blocks an expert, but losses were "
                f"measured for {widths - 1}"
            )
        sizes = np.full(layers, spec.block_bytes)
        sizes[list(spec.moe_layers)] = spec.row_block_bytes
        blocks = solve(
            losses.reshape(-1, widths).astype(np.float64),
            counts.ravel(),
            np.repeat(sizes, experts * roles),
            math.log1p(self.loss),
        )
        anchor, beside = np.moveaxis(blocks.reshape(layers, experts, roles), 2, 0)
        table = table_of(spec, profile, ordered, 0, beside[:, None, :].astype(np.int16))
        diagonal = np.arange(experts)
        table.blocks[:, diagonal, diagonal] = anchor
        return replace(table, dominant=None)


def solve(losses: Floats, frequency: Ints, cost: Ints | float, most: float) -> Ints:
    """Return each item's blocks [items] with the least sum of frequency x blocks x cost.

    losses [items, widths]: of an item at 0, 1, ... all blocks, any unit, NaN: unknown; frequency
    [items]; cost of a block, of each item's or of all; most: what the losses of all items may sum
    to, 0 or more.

    Every item walks down the lower convex hull of its losses. A Lagrangian multiplier, the loss
    that a saved byte is worth, says how far; the best is the largest at which the sum fits. Steps
    to any width fill what is left, the least loss for a saved byte first. Items of unknown loss,
    and those that never occur, stay full.
    """
    is_known = np.isfinite(losses).all(axis=1) & (frequency > 0)
    blocks = np.full(len(losses), losses.shape[1] - 1)
    blocks[is_known] = _solve(
        monotone(losses[is_known]),
        np.broadcast_to(cost, frequency.shape)[is_known] * frequency[is_known].astype(np.float64),
        most,
    )
    return blocks


def monotone(losses: Floats) -> Floats:
    """Return losses [items, widths] by which a wider item loses no more, a full one nothing.

    Noise can make a measured loss negative, or a wider one larger: each width is charged the
    largest of its own loss and those of wider ones, so that no luck is counted on.

    >>> monotone(np.array([[0.3, -0.1, 0.2, -0.2, 0.0]]))
    array([[0.3, 0.2, 0.2, 0. , 0. ]])
    """
    extra = losses - losses[:, -1:]
    return np.maximum.accumulate(extra[:, ::-1], axis=1)[:, ::-1]


def _solve(losses: Floats, prices: Floats, most: float) -> Ints:
    """Solve for known, monotone losses; prices [items]: of a block of each."""
    at = np.full(len(losses), losses.shape[1] - 1)
    steps = [
        (slope / price, item, to)
        for item, (item_losses, price) in enumerate(zip(losses, prices.tolist(), strict=True))
        for to, slope in _descent(item_losses.tolist())
    ]
    left = most
    for _, item, to in sorted(steps, key=lambda step: step[0]):  # an item's stay in their order
        more = losses[item, to] - losses[item, at[item]]
        if more > left:
            break
        at[item], left = to, left - more

    items, widths = np.arange(len(losses)), np.arange(losses.shape[1])
    while True:
        gained = losses - losses[items, at][:, None]
        saved = (at[:, None] - widths) * prices[:, None]
        fits = (saved > 0) & (gained <= left)
        if not fits.any():
            return at
        rate = np.divide(gained, saved, out=np.full(gained.shape, np.inf), where=fits)
        item, to = np.divmod(rate.argmin(), len(widths))
        at[item], left = to, left - gained[item, to]


def _descent(losses: list[float]) -> list[tuple[int, float]]:
    """Return corners of the lower convex hull below the full width, the widest first.

    Each with the loss of a block on the way there from the one before, which grows.
    """
    full = len(losses) - 1
    corners = [(full, -math.inf)]
    for width in range(full - 1, -1, -1):
        while True:
            last, before = corners[-1]
            slope = (losses[width] - losses[last]) / (last - width)
            if slope > before:
                break
            corners.pop()
        corners.append((width, slope))
    return corners[1:]
