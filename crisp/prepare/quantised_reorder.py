"""Reordering of neurons in a quantised checkpoint's own format, and its copy in plain numbers.

Neurons are rows of gate and up, and columns of down. Where columns share a scale in runs (groups of
inputs, blocks), an order keeps each run together: runs are ordered by the importance of all of
their neurons, and the neurons within each. What that costs is a coarser order; no number changes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.checkpoint.expert_tensors import ExpertTensor
from crisp.checkpoint.files import TensorEntry
from crisp.checkpoint.quantised import DecodedCheckpoint
from crisp.checkpoint.quantised.axes import AxisOrder
from crisp.checkpoint.quantised.numbers import BITS_OF
from crisp.checkpoint.quantised.weight import QuantisedWeight
from crisp.checkpoint.streaming import ByteSource, Tiles
from crisp.errors import CrispError
from crisp.files import atomic

Order = NDArray[np.intp]


@dataclass(frozen=True)
class _NeuronAxis:
    """The axis of a weight's matrix along which neurons lie."""

    axis: int
    before: int  # in front of the neurons along that axis: 2 where gates stand before ups
    each: int  # rows or columns of one neuron side by side: 2 where gate and up alternate

    def order(self, neurons: Order) -> Order:
        """Return the order of the axis for an order of the neurons."""
        first = np.arange(self.before)[:, None, None] * len(neurons)
        inner = np.arange(self.each)
        whole: Order = ((first + neurons[:, None]) * self.each + inner).reshape(-1)
        return whole


def neuron_runs(
    checkpoint: DecodedCheckpoint, neurons: Mapping[str, ExpertTensor]
) -> dict[int, int]:
    """Return by layer how many neighbouring neurons have to stay together; 1: none.

    neurons: of `expert_tensors`. Raises CrispError, naming the tensor, for a format that carries no
    order exactly.
    """
    runs: dict[int, int] = {}
    for name, place in neurons.items():
        weight = checkpoint.weights.get(name)
        run = 1 if weight is None else _run(weight, place)
        if run is None:
            stored = next(iter(checkpoint.weights[name].parts.values()))
            raise CrispError(
                f"{checkpoint.stored.where(stored)}: neurons cannot change places in "
                f"{checkpoint.method} as it is stored here; --dequantize prepares the model in bf16"
            )
        runs[place.layer] = math.lcm(runs.get(place.layer, 1), run)
    return runs


def _neuron_axis(weight: QuantisedWeight, place: ExpertTensor) -> _NeuronAxis:
    """Return where in a matrix [rows, columns] neurons lie; place: [outer, d_ff, inner] of it."""
    rows, columns = weight.shape[-2:]
    if place.inner % columns == 0:
        return _NeuronAxis(0, place.outer, place.inner // columns)
    return _NeuronAxis(1, place.outer // rows, place.inner)


def _axis_order(weight: QuantisedWeight, place: ExpertTensor) -> tuple[_NeuronAxis, AxisOrder]:
    where = _neuron_axis(weight, place)
    how = weight.axes[where.axis]
    assert how is not None
    return where, how


def _run(weight: QuantisedWeight, place: ExpertTensor) -> int | None:
    """Return how many neurons of a weight stay together; None: no order can be carried."""
    where = _neuron_axis(weight, place)
    how = weight.axes[where.axis]
    if how is None or how.run == 1:
        return None if how is None else 1
    run = how.run // where.each
    # runs are whole neurons, and do not reach from the gates to the ups
    return None if how.run % where.each or (where.before > 1 and place.d_ff % run) else run


def check_runs(orders: Mapping[int, Order], runs: Mapping[int, int]) -> None:
    """Raise CrispError for orders that do not keep the runs of their layer together."""
    for layer, order in orders.items():
        run = runs.get(layer, 1)
        firsts = np.repeat(order[:, ::run] // run, run, axis=1)[:, : order.shape[1]]
        whole = order.shape[1] // run * run
        if (order // run != firsts).any() or (order[:, whole:] < whole).any():
            raise CrispError(
                f"layer {layer}: an order that keeps runs of {run} neurons was expected"
            )


class QuantisedTiles:
    """Streams stored tensors with their neurons reordered, one expert's share at a time."""

    def __init__(
        self,
        checkpoint: DecodedCheckpoint,
        neurons: Mapping[str, ExpertTensor],
        orders: Mapping[int, Order],
    ) -> None:
        self._checkpoint, self._orders = checkpoint, orders
        # stored tensor -> the weight that it is part of, what part, where its neurons are
        self._parts = {
            stored: (checkpoint.weights[name], part, place)
            for name, place in neurons.items()
            if name in checkpoint.weights
            for part, stored in checkpoint.weights[name].parts.items()
        }

    def covers(self, tensor: TensorEntry) -> bool:
        """Return whether the tensor is part of a weight with neurons."""
        return tensor.name in self._parts

    def tiles(self, source: ByteSource, tensor: TensorEntry) -> Tiles:
        """Yield the tensor's bytes in their new order."""
        weight, part, place = self._parts[tensor.name]
        where, how = _axis_order(weight, place)
        shape = tensor.shape[1:] if weight.stacked else tensor.shape
        move: Callable[[Any, Order], Any] | None = how.moves.get(part)
        offset = tensor.offset
        for expert in range(place.first, place.first + place.count):
            bits = np.empty(shape, BITS_OF[tensor.dtype])
            if bits.nbytes:
                source.read(bits, offset)
                offset += bits.nbytes
            if move is not None:
                bits = move(bits, where.order(self._orders[place.layer][expert]))
            yield np.ascontiguousarray(bits).reshape(-1).view(np.uint8)

    def adapt_config(self, folder: Path) -> None:
        """Say in the config of the result that GPTQ's inputs may be of any group, if they may.

        Each input carries the number of its group; many readers look at it under ``desc_act`` only.
        """
        if self._checkpoint.method != "gptq" or self._checkpoint.settings.get("desc_act") is True:
            return
        if not any("g_idx" in weight.parts for weight, _, _ in self._parts.values()):
            return
        for name in ("config.json", "quantize_config.json"):
            if not (folder / name).exists():
                continue
            content = json.loads((folder / name).read_bytes())
            content.get("quantization_config", content)["desc_act"] = True
            with atomic(folder / name) as temporary:
                temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
