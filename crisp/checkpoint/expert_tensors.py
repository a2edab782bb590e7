"""Which tensors of a checkpoint hold the neurons of routed experts, and where in them each lies.

The names are found by transformers' own rules of loading, so any spelling will do that it loads. A
tensor is [experts, outer, d_ff, inner] in memory: an order of neurons is applied along its third
axis and everything else stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crisp.adapter import ExpertLayout, Experts
from crisp.checkpoint.conversion import ConversionError, TensorGroup, tensor_groups
from crisp.checkpoint.files import SINGLE, Checkpoint, TensorEntry
from crisp.checkpoint.placement import Part, Placement, placements
from crisp.errors import CrispError
from crisp.extras import import_extra

FLOATS = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class ExpertTensor:
    """A tensor with weights of neurons, [count, outer, d_ff, inner] in memory."""

    layer: int  # decoder layer
    first: int  # the expert of the first entry; the others follow
    count: int  # experts
    outer: int  # elements in front of the axis of neurons
    d_ff: int
    inner: int  # elements of one neuron behind it
    parts: tuple[Part, ...]  # the matrices in an expert's entry
    biases: bool  # it holds biases, not matrices


def expert_tensors(checkpoint: Checkpoint, layout: ExpertLayout) -> dict[str, ExpertTensor]:
    """Return every tensor with weights or biases of routed experts' neurons, by name.

    layout: of the model, whose weights are not read: one on the meta device will do. Raises
    CrispError, naming file and tensor, for a spelling that is not understood, tensors that are
    missing, left over or of another shape, and those that are no floating-point numbers.
    """
    groups, unknown = tensor_groups(layout.model, checkpoint)
    _refuse_left_over(checkpoint, layout, unknown)
    finder = _Finder(checkpoint, layout.model)
    result: dict[str, ExpertTensor] = {}
    for layer in layout.layers:
        experts = Experts.of(layer)
        for target in experts.parameters():
            if target not in groups:
                raise _unknown_spelling(checkpoint, layer.index)
            result |= finder.tensors(groups[target], experts, layer.index)
    return result


def _refuse_left_over(
    checkpoint: Checkpoint, layout: ExpertLayout, unknown: Mapping[str, str]
) -> None:
    """Raise CrispError for tensors of routed experts that become none of the model's.

    unknown: the name that transformers' rules give a tensor, and its own.
    """
    prefixes = tuple(f"{layer.name}." for layer in layout.layers)
    inside = re.compile(rf"{re.escape(layout.stack)}\.\d+\.(.*\.)?experts\.")
    for target, name in unknown.items():
        if target.startswith(prefixes):
            raise CrispError(f"{checkpoint.where(name)}: is not expected among routed experts")
        if inside.match(target) and "shared" not in target:
            raise CrispError(f"{checkpoint.where(name)}: is not expected; not understood")


def _unknown_spelling(checkpoint: Checkpoint, layer: int) -> CrispError:
    """Return the error for a layer whose experts are nowhere."""
    in_layer = [x for x in checkpoint.tensors.values() if f".{layer}." in x.name]
    largest = max(in_layer, key=lambda tensor: tensor.nbytes, default=None)
    return CrispError(
        f"{checkpoint.folder}: the experts of layer {layer} are not in a known spelling "
        f"(its largest tensor: {largest.name if largest else 'none'}); one that transformers "
        "loads was expected"
    )


class _Finder:
    """Finds the neurons in the tensors that make one parameter of the model."""

    def __init__(self, checkpoint: Checkpoint, model: Any) -> None:
        self._checkpoint, self._model = checkpoint, model
        self._empty: dict[str, Any] = dict(model.state_dict())
        self._known: dict[Any, dict[str, Placement]] = {}  # layers are alike: found once

    def tensors(self, group: TensorGroup, experts: Experts, layer: int) -> dict[str, ExpertTensor]:
        """Return the tensors of a group by name."""
        entries = self._checkpoint.tensors
        for names in group.sources.values():
            for name in names:
                if entries[name].dtype not in FLOATS:
                    raise CrispError(
                        f"{self._checkpoint.where(name)}: is {entries[name].dtype}: quantised in a "
                        "way that config.json does not name"
                    )
        n, biases = experts.n_experts, group.target.endswith("_bias")
        result: dict[str, ExpertTensor] = {}
        if group.converter is None or any(len(x) == 1 for x in group.sources.values()):
            for name, place in self._fused(group, experts).items():
                result[name] = _at(place, layer, 0, n, experts.d_ff, biases)
            return result
        placed = self._one_by_one(group, experts)
        for pattern, names in group.sources.items():
            for expert, name in enumerate(names):
                result[name] = _at(placed[pattern], layer, expert, 1, experts.d_ff, biases)
        return result

    def _fused(self, group: TensorGroup, experts: Experts) -> dict[str, Placement]:
        """Return the placements in tensors that each hold all experts, by name."""
        names = [name for names in group.sources.values() for name in names]
        if group.converter is None:
            self._check_shape(self._checkpoint.tensors[names[0]], self._empty[group.target].shape)
        shapes = {}
        for name in names:
            first, *rest = self._checkpoint.tensors[name].shape or (0,)
            if first != experts.n_experts:
                raise self._wrong(group, f"is {[first, *rest]}, not of {experts.n_experts} experts")
            shapes[name] = (1, *rest)
        return self._place(group, experts, shapes, None)

    def _one_by_one(self, group: TensorGroup, experts: Experts) -> dict[str, Placement]:
        """Return the placements in tensors of one expert each, by the pattern of their names."""
        entries, shapes = self._checkpoint.tensors, {}
        for pattern, names in group.sources.items():
            numbers = [_number(name) for name in names]
            for name in names[1:]:
                if _prefix(name) != _prefix(names[0]):
                    other = names[0]
                    raise CrispError(f"{self._checkpoint.where(name)}: there is {other!r} as well")
            for name, number in zip(names, numbers, strict=True):
                if number >= experts.n_experts:
                    raise CrispError(
                        f"{self._checkpoint.where(name)}: is not expected among routed experts"
                    )
            lacking = sorted(set(range(experts.n_experts)) - set(numbers))
            if lacking:
                name = re.sub(rf"\.{numbers[0]}\.(?!.*\.\d+\.)", f".{lacking[0]}.", names[0])
                file = self._checkpoint.folder / (self._checkpoint.index or SINGLE)
                raise CrispError(f"{file}: lacks tensor {name!r}")
            shapes[pattern] = _commonest([entries[name].shape for name in names])
            for name in names:
                self._check_shape(entries[name], shapes[pattern])
        return self._place(group, experts, shapes, 0)

    def _place(
        self,
        group: TensorGroup,
        experts: Experts,
        shapes: dict[str, tuple[int, ...]],
        part: int | None,
    ) -> dict[str, Placement]:
        """Return the placements of one expert, by name or (``part`` 0) pattern."""
        expected = (1, *self._empty[group.target].shape[1:])
        leaf = group.target.rpartition(".")[2]
        key = (leaf, type(group.converter), expected, *shapes.items()) if part == 0 else None
        if key is not None and key in self._known:
            return self._known[key]
        pattern_of = {x: p for p, names in group.sources.items() for x in names}

        def convert(labels: Mapping[str, Any]) -> Any:
            def read(name: str) -> Any:
                return labels[name if part is None else pattern_of[name]]

            try:
                whole = group.convert(_OfOneExpert(self._model, expected), part, read)[group.target]
            except ConversionError as error:
                raise self._wrong(group, str(error)) from error
            if whole.shape != expected:
                raise self._wrong(
                    group,
                    f"becomes {list(whole.shape[1:])} of each expert; {list(expected[1:])} was "
                    "expected from the config",
                )
            return whole

        def split(whole: Any) -> list[tuple[int, Any]]:
            return experts.split(group.target, whole[0])

        found = placements(shapes, convert, split)
        if found is None:
            raise self._wrong(group, "its neurons are not understood")
        if key is not None:
            self._known[key] = found
        return found

    def _check_shape(self, tensor: TensorEntry, expected: Any) -> None:
        if tensor.shape != tuple(expected):
            raise CrispError(
                f"{self._checkpoint.where(tensor.name)}: is {list(tensor.shape)}; "
                f"{list(expected)} was expected from the config"
            )

    def _wrong(self, group: TensorGroup, reason: str) -> CrispError:
        name = next(name for names in group.sources.values() for name in names)
        return CrispError(f"{self._checkpoint.where(name)}: {reason}")


class _OfOneExpert:
    """A model whose parameters are of one expert, for rules that look at their shapes."""

    def __init__(self, model: Any, shape: tuple[int, ...]) -> None:
        self._model, self._shape = model, shape

    def get_parameter(self, _: str) -> Any:
        """Return a tensor of that shape, without numbers."""
        return import_extra("torch").empty(self._shape, device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _at(
    place: Placement, layer: int, first: int, count: int, d_ff: int, biases: bool
) -> ExpertTensor:
    return ExpertTensor(layer, first, count, place.outer, d_ff, place.inner, place.parts, biases)


def _number(name: str) -> int:
    """Return the last number among the parts of a tensor's name: that of its expert."""
    numbers = [part for part in name.split(".") if part.isdecimal()]
    return int(numbers[-1]) if numbers else 0


def _prefix(name: str) -> str:
    """Return what stands before the number of a tensor's expert in its name."""
    return name[: name.rfind(f".{_number(name)}.")]


def _commonest(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    return max(set(shapes), key=shapes.count)
