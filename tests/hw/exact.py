"""What a model in bfloat16 should write, in float64, and how far its roundings may lead from it.

Nothing here depends on the order in which a processor adds up, or on the instructions that it has
for halves: it takes only that each result is rounded once.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import silu
from torch.overrides import TorchFunctionMode

from crisp.adapter import Experts, expert_layout, intercept_experts
from crisp.hw.model.resident import ResidentModel
from crisp.hw.store.reader import Store

# The most that rounding to nearest changes a number, as a share of it.
BF16, FP32 = 2**-8, 2**-24
# Rounding errors are taken for independent, of mean 0 and even: a sum of millions of them is beyond
# six of its deviations once in 500 million times.
DEVIATIONS = 6


@dataclass(frozen=True, eq=False)
class Event:
    """What a layer's experts were given, and what came back."""

    hidden: Any  # [rows, d_model]
    index: Any  # [rows, k]
    weights: Any  # [rows, k]
    output: Any  # [rows, d_model]


@contextmanager
def watching(model: ResidentModel) -> Iterator[list[list[Event]]]:
    """The events of every MoE layer in turn, while the model runs."""
    seen: list[list[Event]] = [[] for _ in model.layout.layers]
    hooks = [
        layer.experts.register_forward_hook(
            lambda _, given, output, own=own: own.append(Event(*given, output))
        )
        for own, layer in zip(seen, model.layout.layers, strict=True)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


class Exact:
    """A model whose experts end in silu, in float64."""

    def __init__(self, model: Any) -> None:
        """model: with the weights of the store; it is converted in place."""
        self._model = model.double().requires_grad_(False)
        self._model.set_attn_implementation("eager")  # whose every step can be watched
        self._found = expert_layout(model)
        self._weights = [
            [experts.neurons(e) for e in range(experts.n_experts)]
            for experts in map(Experts.of, self._found.layers)
        ]

    def check_experts(self, events: list[list[Event]]) -> None:
        """Every output is within its rounding of what the same inputs give."""
        for which, of_layer in enumerate(events):
            for event in of_layer:
                expected, room = self.output(which, event), self.room(which, event)
                assert ((event.output - expected).abs() <= room).all(), (which, event.index)

    def output(self, which: int, event: Event) -> Any:
        """sum over experts of weight * (silu(x Wg^T) * (x Wu^T)) Wd: [rows, d_model]."""
        out = torch.zeros(event.hidden.shape, dtype=torch.float64)
        for x, weight, rows, (both, down) in self._parts(which, event):
            inner = silu(x @ both[0].T) * (x @ both[1].T)
            out = out.index_add(0, rows, weight * (inner @ down))
        return out

    def room(self, which: int, event: Event) -> Any:
        """How far an output may be from `output`: [rows, d_model].

        It is summed in float32 and rounded to bfloat16. A sum of n products, in any order, is off
        by at most n roundings of the sum of their sizes. So gate and up are, of d_model products,
        and through silu, whose slope is at most 1.1, what they are multiplied to; so is the down
        projection, of d_ff. 32 more are for the activation's own steps, an int8 group's scale, the
        router's weight, the sum over experts, and what is of second order.
        """
        room = torch.zeros(event.hidden.shape, dtype=torch.float64)
        for x, weight, rows, (both, down) in self._parts(which, event):
            n, (gate, up) = x.shape[1], (x @ part.T for part in both)
            sizes = [x.abs() @ part.abs().T for part in both]
            inner = n * (1.1 * sizes[0] * up.abs() + silu(gate).abs() * sizes[1])
            inner += (len(down) + 32) * (silu(gate) * up).abs()
            room = room.index_add(0, rows, FP32 * weight.abs() * (inner @ down.abs()))
        return room + BF16 * (self.output(which, event).abs() + room)

    def _parts(self, which: int, event: Event) -> Iterator[Any]:
        """(inputs, weights [n, 1], rows, matrices) of each expert."""
        for e in event.index.unique().tolist():
            rows, place = (event.index == e).nonzero(as_tuple=True)
            weight = event.weights[rows, place, None].double()
            yield event.hidden[rows].double(), weight, rows, self._weights[which][e]

    def logits(self, ids: list[int], events: list[list[Event]]) -> tuple[Any, list[Any]]:
        """(logits [tokens, vocabulary] of a text whose routers choose as they did in ``events``,
        the roundings that lead to them).

        A rounding is a tensor of zeros that the result of a step was multiplied by, plus 1. There
        are more of them than are made: attention in one piece and experts in float32 round less
        often. Where the model in bfloat16 computes in float32, so does this one, and none counts.
        """
        routed = [
            (torch.cat([e.index for e in own]), torch.cat([e.weights for e in own]))
            for own in events
        ]

        def run(which: int, hidden: Any, *_: Any) -> Any:
            return self.output(which, Event(hidden, *routed[which], None))

        embedding = self._model.get_input_embeddings()
        hook = embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())
        try:
            with intercept_experts(self._found, run), _Rounding() as rounding:
                out = self._model(torch.tensor([ids]), use_cache=False).logits[0]
        finally:
            hook.remove()
        return out, rounding.made

    def check_tokens(self, ids: list[int], tokens: list[int], logits: Any, events: Any) -> int:
        """The best logit exceeds the second by what it should, within rounding; and is the best
        where it should exceed it by more than that. Returns how many tokens that says.

        ids: the prompt. tokens: what was written, by logits [tokens, vocabulary].
        """
        exact, roundings = self.logits(ids + tokens[:-1], events)
        told = 0
        for token, row, expected in zip(tokens, logits, exact[len(ids) - 1 :], strict=True):
            best, second = expected.topk(2).indices.tolist()
            margin = expected[best] - expected[second]
            slopes = torch.autograd.grad(margin, roundings, retain_graph=True, allow_unused=True)
            # to first order; an error that is even in [-r, r] has a variance of r^2 / 3
            square = sum(float((slope**2).sum()) for slope in slopes if slope is not None)
            room = DEVIATIONS * BF16 * math.sqrt(square / 3)
            margin = margin.detach()
            assert abs(row[best] - row[second] - margin) <= room
            if margin > room:
                assert token == best
                told += 1
        return told


class _Rounding(TorchFunctionMode):
    """Gives the result of every step in float64 a rounding of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def __torch_function__(self, step: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = step(*args, **(kwargs or {}))
        if not isinstance(out, torch.Tensor) or out.dtype != torch.float64 or not out.requires_grad:
            return out
        place = out.untyped_storage().data_ptr()
        if any(
            isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() == place for x in args
        ):
            return out  # another view of the same numbers
        self.made.append(torch.zeros_like(out, requires_grad=True))
        return out * (1 + self.made[-1])


def planted(store: Store, folder: Path, row: int, expert: int, blocks: range) -> Store:
    """A copy of a store in which some blocks of an expert are the next expert's."""
    shutil.copytree(store.path, folder)
    path = folder / store.files[row].name
    content = bytearray(path.read_bytes())
    for block in blocks:
        at = [store.offset(row, (expert + i) % store.spec.n_experts, block) for i in (0, 1)]
        stride = store.spec.block_bytes
        content[at[0] : at[0] + stride] = content[at[1] : at[1] + stride]
    path.write_bytes(content)
    return Store.open(folder)
