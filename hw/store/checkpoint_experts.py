"""Read a checkpoint's routed experts one by one, neuron by neuron, however it stores them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from crisp.adapter import ExpertLayout, Experts, expert_layout
from crisp.checkpoint.expert_tensors import ExpertTensor, expert_tensors
from crisp.checkpoint.files import Checkpoint, TensorEntry, combine_digests
from crisp.checkpoint.loading import load_config, model_without_weights, one_line_errors
from crisp.checkpoint.streaming import ByteSource, hash_tiles, read_tiles
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.hw.store.dtypes import UNSIGNED, Array, all_finite
from crisp.model.spec import ModelSpec

GATE, UP, DOWN = range(3)
# Parts of an expert by its tensors' names; two parts are concatenated or interleaved in a tensor
_PARTS = {
    "w1": (GATE,), "gate_proj": (GATE,),
    "w3": (UP,), "up_proj": (UP,),
    "w2": (DOWN,), "down_proj": (DOWN,),
    "gate_up_proj": (GATE, UP), "gate_up_proj_bias": (GATE, UP),
}  # fmt: skip


class Expert(NamedTuple):
    """The numbers of one expert, as bits of the checkpoint's type: views into what was read."""

    matrices: tuple[Array, Array, Array]  # gate, up and down, [d_ff, d_model] each
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
        self._experts = {layer.index: Experts.of(layer) for layer in layout.layers}
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
        parts: dict[int, Array] = {}
        biases: tuple[Array, ...] = ()
        for tensor, place in self._by_layer[layer]:
            if not place.first <= expert < place.first + place.count:
                continue
            numbers = self._by_neuron(tensor, place, expert)
            if tensor.name.endswith("_bias"):
                biases = numbers[0, :, 0], numbers[1, :, 0]
            else:
                parts |= dict(zip(_PARTS[_leaf(tensor.name)], numbers, strict=True))
        return Expert((parts[GATE], parts[UP], parts[DOWN]), biases)

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

    def _by_neuron(self, tensor: TensorEntry, place: ExpertTensor, expert: int) -> Array:
        """Read a tensor's share of one expert: [parts, d_ff, numbers of a neuron]."""
        parts = len(_PARTS[_leaf(tensor.name)])
        data, kind = self._read(tensor, place, expert)
        if not all_finite(data, kind):
            raise CrispError(
                f"{self._checkpoint.where(tensor.name)}: expert {expert} has NaN or infinite "
                "weights; finite ones were expected"
            )
        apart = parts if self._experts[place.layer].concatenated else 1
        whole = data.reshape(place.outer // apart, apart, place.d_ff, parts // apart, -1).transpose(
            1, 3, 2, 0, 4
        )  # one of the first two is 1, and so is one of the last two
        return whole.reshape(parts, place.d_ff, -1)

    def _read(self, tensor: TensorEntry, place: ExpertTensor, expert: int) -> tuple[Array, str]:
        """Read a tensor's share of one expert: [outer, d_ff, inner] bits, and their type."""
        data = np.empty((place.outer, place.d_ff, place.inner), UNSIGNED[tensor.dtype])
        offset = tensor.offset + (expert - place.first) * data.nbytes
        self._sources[tensor.shard].read(data, offset)
        if tensor.name not in self._hashes:
            self._hashes[tensor.name] = import_extra("xxhash").xxh3_128()
        self._hashes[tensor.name].update(data.data)
        self._advance(data.nbytes)
        return data, tensor.dtype


def _leaf(name: str) -> str:
    """Return the last part of a tensor's name."""
    return name.removesuffix(".weight").rpartition(".")[2]


def locate_experts(folder: Path, spec: ModelSpec, activation: str) -> ExpertLayout:
    """Find the experts of the model in ``folder``; no weights are read.

    Raises CrispError for a model without MoE layers, of another geometry than ``spec``, without
    gates, or with an activation that is not ``activation``.
    """
    with one_line_errors(str(folder), "its config"):
        layout = expert_layout(model_without_weights(folder, load_config(folder)))
    for layer in layout.layers:
        experts = Experts.of(layer)
        if not experts.has_gate:
            raise CrispError(f"{folder}: {layer.name} has no gate; gated experts were expected")
        sizes = (experts.n_experts, experts.d_model, experts.d_ff, experts.has_bias)
        if sizes != (spec.n_experts, spec.d_model, spec.d_ff, spec.biases):
            raise CrispError(f"{folder}: {layer.name} is not of the size its config says: {sizes}")
        if _gate(layer.experts) != activation:
            raise CrispError(
                f"{folder}: the gate of {type(layer.experts).__name__} is not understood; "
                f"{activation} was expected from the config"
            )
    if tuple(layer.index for layer in layout.layers) != spec.moe_layers:
        raise CrispError(f"{folder}: its MoE layers are not those its config says")
    return layout


def _gate(module: Any) -> str | None:
    """Return the store's name of a module's activation; None: it has none."""
    plain = import_extra("transformers.integrations.moe")._default_apply_gate
    if type(module)._apply_gate is plain:
        kinds = import_extra("transformers.activations")
        acts = {
            "silu": (import_extra("torch.nn").SiLU, kinds.SiLUActivation),
            "gelu": kinds.GELUActivation,
        }
        return next((name for name, kind in acts.items() if isinstance(module.act_fn, kind)), None)
    clamped = getattr(module, "alpha", None), getattr(module, "limit", None)
    return "gpt_oss" if clamped == (1.702, 7.0) else None
