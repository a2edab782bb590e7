"""Read the routed experts of a GGUF file one by one, decoded by the format's own package."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np

from crisp.checkpoint.files import TensorEntry, combine_digests
from crisp.checkpoint.gguf.geometry import GgufModel
from crisp.checkpoint.quantised.numbers import Floats
from crisp.checkpoint.streaming import ByteSource, hash_tiles, read_tiles
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.model.gguf_header import GgufTensor
from crisp.progress import Progress, counter, no_progress

# What the gate of an expert is, which no field says: llama.cpp has it in each architecture's code
_SILU = (
    "llama", "llama4", "qwen2moe", "qwen3moe", "qwen3next", "qwen3vlmoe", "qwen35moe", "deepseek",
    "deepseek2", "glm4moe", "olmoe", "phimoe", "dbrx", "arctic", "granitemoe", "granitehybrid",
    "minimax-m2", "ernie4_5-moe", "bailingmoe", "bailingmoe2", "dots1", "hunyuan-moe", "jamba",
    "lfm2moe", "exaone-moe", "kimi-linear", "mimo2", "afmoe", "grovemoe",
)  # fmt: skip
_ACTIVATIONS = dict.fromkeys(_SILU, "silu") | {
    "gpt-oss": "gpt_oss", "grok": "gelu_tanh", "nemotron_h_moe": "relu2",
}  # fmt: skip


def gguf_activation(model: GgufModel) -> str:
    """Return the store's name of what the experts compute.

    Raises CrispError for an architecture whose activation is not known, and without the package
    that decodes experts.
    """
    import_extra("gguf.quants", "gguf")
    found = _ACTIVATIONS.get(model.architecture)
    if found is None or model.spec.matrices != (2 if found == "relu2" else 3):
        raise CrispError(
            f"{model.header.path}: experts of the architecture {model.architecture!r} are not "
            f"computed here; one of {', '.join(_ACTIVATIONS)} was expected"
        )
    return found


class GgufExperts:
    """Reads experts as float32, layer by layer; memory holds one, and the bytes it is made from."""

    kind = "F32"

    def __init__(self, model: GgufModel, progress: Progress = no_progress) -> None:
        """progress: called with the bytes read, and with those of all experts and of the hashes."""
        routed = [t.nbytes for tensors in model.routed.values() for t in tensors.values()]
        routed += [t.nbytes for t in model.biases()] if model.spec.biases else []
        total = sum(routed) + sum(tensor.nbytes for tensor in model.header.tensors.values())
        self._model, self._advance = model, counter(progress, total)
        self._quants = import_extra("gguf.quants", "gguf")
        self._sources: dict[Any, ByteSource] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for tensor in self._model.header.tensors.values():
            if tensor.path not in self._sources:
                source = self._stack.enter_context(ByteSource(tensor.path))
                self._sources[tensor.path] = source
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._stack.close()

    def matrices(self, layer: int, expert: int) -> tuple[Floats, ...]:
        """Return gate (where there is one), up and down of one expert, [d_ff, d_model] each.

        Raises CrispError for NaN and infinite weights.
        """
        tensors = self._model.routed[layer]
        down = self._decode(tensors["down"], expert).T
        if "gate_up" in tensors:
            both = self._decode(tensors["gate_up"], expert)
            return both[: len(down)], both[len(down) :], down
        names = [name for name in ("gate", "up") if name in tensors]
        return *(self._decode(tensors[name], expert) for name in names), down

    def biases(self, layer: int, expert: int) -> tuple[Floats, ...]:
        """Return the biases of gate and up, [d_ff] each; none where the model has none."""
        if not self._model.spec.biases:
            return ()
        return tuple(self._decode(tensor, expert) for tensor in self._model.biases(layer))

    def weights(self) -> str:
        """Return the digest of all tensors, as `crisp.checkpoint.files.weights_digest` has it."""
        entries, sums = [], {}
        for tensor in self._model.header.tensors.values():
            source = self._sources[tensor.path]
            sums[tensor.name] = hash_tiles(read_tiles(source, tensor.offset, tensor.nbytes))
            entries.append(
                TensorEntry(
                    tensor.name, tensor.path.name, tensor.kind, tensor.shape, tensor.offset,
                    tensor.nbytes,
                )
            )  # fmt: skip
            self._advance(tensor.nbytes)
        return combine_digests(entries, sums)

    def _decode(self, tensor: GgufTensor, expert: int) -> Floats:
        """Return one expert's share of a tensor, in float32."""
        rows, nbytes = tensor.shape[1:-1], tensor.nbytes // tensor.shape[0]
        stored = np.empty(nbytes, np.uint8)
        self._sources[tensor.path].read(stored, tensor.offset + expert * nbytes)
        self._advance(nbytes)
        kind = self._quants.GGMLQuantizationType[tensor.kind]
        try:
            with np.errstate(all="ignore"):  # what is not finite is refused below
                numbers: Floats = self._quants.dequantize(stored.reshape(*rows, -1), kind)
        except NotImplementedError as error:
            raise CrispError(f"{tensor.where}: {tensor.kind} cannot be decoded by gguf") from error
        if not np.isfinite(numbers).all():
            raise CrispError(
                f"{tensor.where}: expert {expert} has NaN or infinite weights; finite ones were "
                "expected"
            )
        return numbers.astype(np.float32, copy=False)
