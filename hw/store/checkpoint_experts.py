"""Read a checkpoint's routed experts one by one, neuron by neuron, however it stores them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from crisp.adapter import ExpertLayout, Experts, expert_layout, find_activation
from crisp.checkpoint.expert_tensors import ExpertTensor, expert_tensors
from crisp.checkpoint.files import Checkpoint, TensorEntry, combine_digests
from crisp.checkpoint.loading import load_config, model_without_weights, one_line_errors
from crisp.checkpoint.placement import Part
from crisp.checkpoint.streaming import ByteSource, hash_tiles, read_tiles
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.hw.store.dtypes import UNSIGNED, Array, all_finite
from crisp.model.activation import Activation
from crisp.model.spec import ModelSpec


class Expert(NamedTuple):
    """The numbers of one expert, as bits of the checkpoint's type: views into what was read."""

    matrices: tuple[Array, ...]  # gate (where there is one), up and down, [d_ff, d_model] each
    biases: tuple[Array, ...]  # of gate and up, [d_ff] each; empty where the model has none


class ExpertReader:
    """Reads each expert once, layer by layer and in order, and hashes the weights meanwhile.

    `weights` hashes what is left, and returns the digest of the whole checkpoint.
    """

    def __init__(
        self, checkpoint: Checkpoint, layout: ExpertLayout, advance: Callable[[int], None]
    ) -> None:
        """layout: of `locate_experts`. advance: called with the bytes read since its last call."""
        self._checkpoint, self._advance = checkpoint, advance
        self._places = expert_tensors(checkpoint, layout)
        self.kind = self._only_kind()  # safetensors' name of the type of all experts' weights
        self._by_layer: dict[int, list[tuple[TensorEntry, ExpertTensor]]] = {}
        for name, place in self._places.items():
            tensors = self._by_layer.setdefault(place.layer, [])
            tensors.append((checkpoint.tensors[name], place))
        self._hashes: dict[str, Any] = {}
        self._sources: dict[str, ByteSource] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for shard in self._checkpoint.shards:
            source = ByteSource(self._checkpoint.folder / shard)
            self._sources[shard] = self._stack.enter_context(source)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._stack.close()

    def expert(self, layer: int, expert: int) -> Expert:
        """Read one expert. Raises CrispError for NaN and infinite weights."""
        matrices: dict[int, Array] = {}
        biases: dict[int, Array] = {}
        for tensor, place in self._by_layer[layer]:
            if place.first <= expert < place.first + place.count:
                numbers = self._finite(tensor, place, expert)
                for part in place.parts:
                    if place.biases:
                        biases[part.matrix] = numbers[part.offset :: part.neuron][: place.d_ff]
                    else:
                        matrices[part.matrix] = _matrix(numbers, part, place)
        return Expert(*(tuple(x[which] for which in sorted(x)) for x in (matrices, biases)))

    def weights(self) -> str:
        """Hash the tensors that are left; return `crisp.checkpoint.files.weights_digest`."""
        tensors = self._checkpoint.tensors
        sums = {name: digest.hexdigest() for name, digest in self._hashes.items()}
        for tensor in tensors.values():
            if tensor.name not in sums:
                source = self._sources[tensor.shard]
                sums[tensor.name] = hash_tiles(read_tiles(source, tensor.offset, tensor.nbytes))
                self._advance(tensor.nbytes)
        return combine_digests(tensors.values(), sums)

    def _only_kind(self) -> str:
        """Return the type of all experts' weights; CrispError if there are several."""
        kinds = {self._checkpoint.tensors[name].dtype: name for name in self._places}
        if len(kinds) > 1:
            (one, name), (other, _), *_ = kinds.items()
            raise CrispError(
                f"{self._checkpoint.where(name)}: is {one}, and other experts' weights are "
                f"{other}; one type was expected"
            )
        return next(iter(kinds))

    def _finite(self, tensor: TensorEntry, place: ExpertTensor, expert: int) -> Array:
        """Read a tensor's share of one expert: all its numbers in their order."""
        data, kind = self._read(tensor, place, expert)
        if not all_finite(data, kind):
            raise CrispError(
                f"{self._checkpoint.where(tensor.name)}: expert {expert} has NaN or infinite "
                "weights; finite ones were expected"
            )
        return data

    def _read(self, tensor: TensorEntry, place: ExpertTensor, expert: int) -> tuple[Array, str]:
        """Read the bits of a tensor's share of one expert, and their type."""
        data = np.empty(place.outer * place.d_ff * place.inner, UNSIGNED[tensor.dtype])
        offset = tensor.offset + (expert - place.first) * data.nbytes
        self._sources[tensor.shard].read(data, offset)
        if tensor.name not in self._hashes:
            self._hashes[tensor.name] = import_extra("xxhash").xxh3_128()
        self._hashes[tensor.name].update(data.data)
        self._advance(data.nbytes)
        return data, tensor.dtype


def _matrix(numbers: Array, part: Part, place: ExpertTensor) -> Array:
    """Return a matrix [d_ff, d_model] of an expert: a view of a tensor's share of it."""
    shape = place.d_ff, len(numbers) // (place.d_ff * len(place.parts))
    strides = part.neuron * numbers.itemsize, part.column * numbers.itemsize
    return np.lib.stride_tricks.as_strided(numbers[part.offset :], shape, strides, writeable=False)


def locate_experts(folder: Path, spec: ModelSpec) -> tuple[ExpertLayout, Activation]:
    """Find the experts of the model in ``folder``, and what they compute; no weights are read.

    Raises CrispError for a model without MoE layers, of another geometry than ``spec``, or with an
    activation that no device computes.
    """
    with one_line_errors(str(folder), "its config"):
        layout = expert_layout(model_without_weights(folder, load_config(folder)))
        activations = {find_activation(Experts.of(layer)) for layer in layout.layers}
    if len(activations) > 1:
        raise CrispError(
            f"{folder}: its layers have {len(activations)} activations "
            f"({', '.join(sorted(map(str, activations)))}); one was expected"
        )
    for layer in layout.layers:
        experts = Experts.of(layer)
        matrices = 3 if experts.has_gate else 2
        sizes = (experts.n_experts, experts.d_model, experts.d_ff, matrices, experts.has_bias)
        if sizes != (spec.n_experts, spec.d_model, spec.d_ff, spec.matrices, spec.biases):
            raise CrispError(f"{folder}: {layer.name} is not of the size its config says: {sizes}")
    if tuple(layer.index for layer in layout.layers) != spec.moe_layers:
        raise CrispError(f"{folder}: its MoE layers are not those its config says")
    return layout, activations.pop()
