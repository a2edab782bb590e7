"""Where in a checkpoint's tensors each neuron of an expert lies, found by following labels.

Checkpoints spell experts in many ways: one tensor for each expert and matrix, or one for a layer;
gate and up in one, one after the other or interleaved; matrices transposed. transformers has rules
that make its own tensors of them. Here the rules convert tensors in which every number is its own
place, so that what comes out says where it is from, whatever the rule does in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from crisp.extras import import_extra

Shape = tuple[int, ...]


class Part(NamedTuple):
    """A matrix [d_ff, columns] inside a tensor: number (n, c) is offset + n neuron + c column."""

    matrix: int  # GATE, UP or DOWN of `crisp.adapter.experts`
    offset: int
    neuron: int
    column: int


@dataclass(frozen=True)
class Placement:
    """One expert's share of a tensor, [outer, d_ff, inner] in memory, and the matrices in it."""

    outer: int
    inner: int
    parts: tuple[Part, ...]


def placements(
    shapes: Mapping[str, Shape],
    convert: Callable[[Mapping[str, Any]], Any],
    split: Callable[[Any], Iterable[tuple[int, Any]]],
) -> dict[str, Placement] | None:
    """Return the placement of an expert in each of some tensors; None: not understood.

    shapes: of one expert's share of each tensor. convert: makes the model's tensor of them.
    split: its matrices, each (which, [d_ff, columns]).
    """
    torch, ends, labels = import_extra("torch"), [0], {}
    for name, shape in shapes.items():
        ends.append(ends[-1] + math.prod(shape))
        labels[name] = torch.arange(ends[-2], ends[-1], dtype=torch.int32).view(shape)
    parts: dict[str, list[Part]] = {name: [] for name in shapes}
    d_ff, covered = 0, 0
    for matrix, places in split(convert(labels)):
        d_ff, columns = places.shape
        covered += places.numel()
        first = int(places[0, 0])
        neuron = int(places[1, 0]) - first if d_ff > 1 else 1
        column = int(places[0, 1]) - first if columns > 1 else 0
        expected = first + neuron * torch.arange(d_ff, dtype=torch.int32)[:, None]
        expected = expected + column * torch.arange(columns, dtype=torch.int32)
        which = int(np.searchsorted(ends, first, side="right")) - 1
        last = first + neuron * (d_ff - 1) + column * (columns - 1)
        if neuron < 1 or column < 0 or not torch.equal(places, expected) or last >= ends[which + 1]:
            return None
        parts[list(shapes)[which]].append(Part(matrix, first - ends[which], neuron, column))
    sizes = dict(zip(shapes, np.diff(ends).tolist(), strict=True))
    if covered != ends[-1] or not all(parts.values()):
        return None
    found = {name: _placement(parts[name], d_ff, sizes[name]) for name in shapes}
    return None if None in found.values() else {k: v for k, v in found.items() if v is not None}


def _placement(parts: list[Part], d_ff: int, size: int) -> Placement | None:
    """Return the placement of matrices in a tensor of so many numbers; None: there is none."""
    inner = parts[0].neuron
    columns = size // (d_ff * len(parts))
    for part in parts:
        starts = (part.offset + part.column * np.arange(columns)) % (d_ff * inner)
        if part.neuron != inner or (starts >= inner).any():
            return None
    return (
        Placement(size // (d_ff * inner), inner, tuple(parts))
        if size % (d_ff * inner) == 0
        else None
    )
