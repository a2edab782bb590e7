"""A quantised checkpoint seen as a plain one, whose weights are decoded when they are read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crisp.checkpoint.files import Checkpoint, TensorEntry, open_checkpoint
from crisp.checkpoint.quantised import awq, bnb, compressed, fp8, gptq, mxfp4
from crisp.checkpoint.quantised.numbers import BITS_OF, Array, Floats, StoredPart
from crisp.checkpoint.quantised.weight import Quantisation, QuantisedWeight, StoredTensors
from crisp.checkpoint.streaming import ByteSource
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.model.fields import Fields
from crisp.model.layouts import quantisation

FORMATS = ("mxfp4", "fp8", "gptq", "awq", "compressed-tensors", "bitsandbytes")
"""What quant_method may be in a config; fbgemm_fp8 is read as fp8."""
_NOWHERE = -1  # the place of a tensor that is not stored as it is seen


@dataclass(frozen=True, eq=False)
class DecodedCheckpoint(Checkpoint):
    """A quantised checkpoint whose ``tensors`` are those of a plain one.

    Weights that are made from others are F32 and have no place in a file. Plain tensors stay as
    they are, and scales of activations are left out.
    """

    stored: Checkpoint  # the same files, with the tensors that are in them
    weights: Mapping[str, QuantisedWeight]  # by name, those that are decoded
    method: str  # a name of FORMATS
    settings: Mapping[str, Any]  # numbers, flags and words of the quantization_config

    @contextmanager
    def decoder(self) -> Iterator[Decoder]:
        """Provide a reader of weights while the files are open."""
        with ExitStack() as stack:
            sources = {
                shard: stack.enter_context(ByteSource(self.folder / shard)) for shard in self.shards
            }
            yield Decoder(self, sources)


class Decoder:
    """Reads stored tensors and makes weights of them."""

    def __init__(self, checkpoint: DecodedCheckpoint, sources: Mapping[str, ByteSource]) -> None:
        self._checkpoint, self._sources = checkpoint, sources

    def read_tensor(self, name: str, dtype: Any) -> Any:
        """Return a decoded weight as a torch tensor of a type, one expert after the other."""
        torch, weight = import_extra("torch"), self._checkpoint.weights[name]
        result = torch.empty(weight.shape, dtype=dtype)
        for expert, into in enumerate(result if weight.stacked else result[None]):
            into.copy_(torch.from_numpy(self.read_matrix(name, expert)))
        return result

    def read_matrix(self, name: str, expert: int) -> Floats:
        """Return one expert's share of a stacked weight, or the whole of another, in float32."""
        weight, parts = self._checkpoint.weights[name], self.parts(name, expert)
        with np.errstate(invalid="ignore", over="ignore"):  # whoever uses the weight checks it
            return weight.decode(parts)

    def parts(self, name: str, expert: int) -> dict[str, StoredPart]:
        """Read what a weight is made from, or one expert's share of it where it is stacked."""
        weight = self._checkpoint.weights[name]
        return {
            key: StoredPart(self._bits(part, expert if weight.stacked else None), self._dtype(part))
            for key, part in weight.parts.items()
        }

    def _dtype(self, name: str) -> str:
        return self._checkpoint.stored.tensors[name].dtype

    def _bits(self, name: str, expert: int | None) -> Array:
        """Read a stored tensor, or entry ``expert`` of its first axis."""
        entry = self._checkpoint.stored.tensors[name]
        shape = entry.shape if expert is None else entry.shape[1:]
        bits = np.empty(shape, BITS_OF[entry.dtype])
        if bits.size:
            self._sources[entry.shard].read(bits, entry.offset + (expert or 0) * bits.nbytes)
        return bits


def open_any(folder: str | Path) -> Checkpoint:
    """Open a checkpoint, quantised or not; a quantised one is a `DecodedCheckpoint`.

    Raises CrispError as `open_checkpoint` and `open_decoded` do.
    """
    config = read_quantization(folder)
    return open_checkpoint(folder) if config is None else open_decoded(folder)


def read_quantization(folder: str | Path) -> Mapping[str, Any] | None:
    """Return the quantization_config in a folder's config.json; None where there is none.

    A multimodal model's may stand beside those of its parts. Raises CrispError for one that is no
    table; what else is wrong with the file is for others to say.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    found = quantisation(Fields(str(Path(folder) / "config.json"), config))
    return None if found is None else found.values


def open_decoded(folder: str | Path) -> DecodedCheckpoint:
    """Open a quantised checkpoint; of the weights only shapes that are stored as numbers are read.

    Raises CrispError for a checkpoint that is not whole, a format that is not understood, and
    tensors that lack a part or do not fit together.
    """
    stored = open_checkpoint(folder)
    where = f"{stored.folder / 'config.json'}: quantization_config"
    config = read_quantization(folder) or {}
    found = _find(StoredTensors(stored), config, where)
    if not found.weights:
        raise CrispError(f"{where}: says {config.get('quant_method')}, and no tensor is quantised")
    weights = {weight.name: weight for weight in found.weights}
    used = {part for weight in found.weights for part in weight.parts.values()}
    tensors = dict[str, TensorEntry]()
    for name, entry in stored.tensors.items():
        if name not in used and name not in found.unused:
            tensors[name] = entry
    for weight in found.weights:
        if weight.name in tensors:
            raise CrispError(f"{stored.where(weight.name)}: is there quantised as well")
        first = stored.tensors[next(iter(weight.parts.values()))]
        size = 4 * math.prod(weight.shape)
        tensors[weight.name] = replace(
            first, name=weight.name, dtype="F32", shape=weight.shape, offset=_NOWHERE, nbytes=size
        )
    settings = {
        key: value
        for key, value in config.items()
        if key != "quant_method" and isinstance(value, bool | int | float | str)
    }
    method = str(config.get("quant_method"))
    return DecodedCheckpoint(
        stored.folder, stored.shards, stored.index, tensors, stored, weights, method, settings
    )


def _find(stored: StoredTensors, config: Mapping[str, Any], where: str) -> Quantisation:
    """Return the weights of the format that a config names."""
    match config.get("quant_method"):
        case "mxfp4":
            return mxfp4.find(stored)
        case "fp8" | "fbgemm_fp8":
            return fp8.find(stored, config, where)
        case "gptq":
            return gptq.find(stored, config, where)
        case "awq":
            return awq.find(stored, config, where)
        case "compressed-tensors":
            return compressed.find(stored, config, where)
        case "bitsandbytes":
            return bnb.find(stored)
        case method:
            raise CrispError(
                f"{where}: quant_method: found {method!r}, expected {', '.join(FORMATS)}; a plain "
                "checkpoint of the same model, in bf16, can be used"
            )
