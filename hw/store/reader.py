"""Open an expert store: a folder with a model's routed experts, cut into blocks ready to be read.

``store.json`` says what it holds; every MoE layer has a safetensors file with a U8 tensor
``expert.<e>`` [blocks, stride] for each expert; ``hashes.safetensors`` has XXH3 of every block.
See docs/store.md.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from crisp.errors import CrispError, reason_of
from crisp.extras import import_extra
from crisp.files import check_readable
from crisp.hw.store.format import DTYPES, HASHES, VERSION, file_name, header, table_name
from crisp.model.activation import Activation
from crisp.model.quantization import BITS, GROUP
from crisp.model.spec import PAGE, STORE_INDEX, ModelSpec

TORCH_TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"} | dict.fromkeys(
    BITS, "bfloat16"
)
"""torch's name of the type of an expert's input, by the store's dtype."""
ORIGINS = ("checkpoint", "synthetic")
_LARGEST = 1 << 31  # any count of a geometry
_LONGEST = 100_000_000  # bytes of a header, as safetensors has it

_FIELDS: dict[str, tuple[type, ...]] = {
    "version": (int,), "spec": (dict,), "dtype": (str,), "activation": (str,), "origin": (str,),
    "weights": (str, type(None)), "seed": (int, type(None)), "files": (list,),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Store:
    """An opened store. ``spec`` is the geometry it was packed with, its bits and block included.

    A block is [block, d_model] gate rows, up rows and down rows (one each for every neuron), then
    [block] gate and up biases where the model has them, in ``dtype``; zeros fill what a short last
    block lacks, and up to ``spec.block_bytes``. Without a gate nothing of it is there. Quantised
    numbers have biases in float16, and behind them float16 scales [3, block, d_model / 64]; see
    `crisp.model.quantization`.
    """

    path: Path
    spec: ModelSpec
    dtype: str  # a key of DTYPES
    activation: str  # as `crisp.model.activation.Activation` spells it
    origin: str  # "checkpoint", or "synthetic": of random weights
    weights: str | None  # the checkpoint's crisp.checkpoint.files.weights_digest
    seed: int | None  # of random weights
    digest: str  # sha256 of store.json, which identifies every byte of the weights
    files: tuple[Path, ...]  # by MoE row: the position of a layer among the MoE layers
    offsets: tuple[tuple[int, ...], ...]  # by MoE row, of each expert's block 0 in its file
    tables: tuple[str, ...]  # by MoE row, sha256 of its blocks' hashes
    source: Mapping[str, Any] | None = None  # the format that a quantised checkpoint was in
    # "fitted" and "nearest": by MoE row, each expert's relative error with int4's scales as they
    # are, and with those of `quantize` alone
    errors: Mapping[str, Any] | None = None

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Open the store in a folder, in milliseconds: weights are not read.

        Raises CrispError, naming the file, for one that is missing, cut off, of another version or
        another store, or damaged in a way that shows without reading weights.
        """
        folder = Path(path)
        fields, digest = _index(folder)
        where = str(folder / STORE_INDEX)
        spec = ModelSpec.from_dict(fields["spec"], where)
        _check(spec, fields, where)
        kind = fields["dtype"], fields["activation"]
        layers = [
            _layer(folder, where, spec, kind, layer, entry)
            for layer, entry in zip(spec.moe_layers, fields["files"], strict=True)
        ]
        return cls(
            path=folder,
            spec=spec,
            dtype=fields["dtype"],
            activation=fields["activation"],
            origin=fields["origin"],
            weights=fields["weights"],
            seed=fields["seed"],
            digest=digest,
            files=tuple(layer.path for layer in layers),
            offsets=tuple(layer.offsets for layer in layers),
            tables=tuple(layer.table for layer in layers),
            source=fields.get("source"),
            errors=fields.get("errors"),
        )

    @property
    def fitted(self) -> bool:
        """Whether int4's scales were fitted."""
        return self.errors is not None

    def offset(self, row: int, expert: int, block: int) -> int:
        """Return the byte at which a block begins in ``files[row]``: a multiple of 4096."""
        return self.offsets[row][expert] + block * self.spec.block_bytes

    def hashes(self, row: int) -> npt.NDArray[np.uint64]:
        """Return XXH3 (64 bits) of all bytes of each block of a layer: [experts, blocks].

        Raises CrispError if the table is damaged or missing.
        """
        path, name = self.path / HASHES, table_name(self.spec.moe_layers[row])
        check_readable(path)
        try:
            with safe_open(path, "np") as file:
                table: npt.NDArray[np.uint64] = file.get_tensor(name)
        except OSError as error:
            raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
        except SafetensorError as error:
            raise CrispError(f"{path}: is no table of hashes with {name}: {error}") from error
        if hashlib.sha256(table.tobytes()).hexdigest() != self.tables[row]:
            raise CrispError(f"{path}: {name} is not what was written with {self.files[row].name}")
        return table

    def check(self, spec: ModelSpec) -> None:
        """Raise CrispError unless the experts of ``spec`` can be read from this store.

        ``spec`` may have fewer layers; nothing outside the routed experts is compared.
        """
        keys = "n_experts", "d_model", "d_ff", "matrices", "biases", "bits", "block", "block_bytes"
        for key in keys:
            if getattr(self.spec, key) != getattr(spec, key):
                raise CrispError(
                    f"{self.path}: the store's {key} is {getattr(self.spec, key)}, that of "
                    f"{spec.name} is {getattr(spec, key)}"
                )
        if self.spec.moe_layers[: len(spec.moe_layers)] != spec.moe_layers:
            raise CrispError(
                f"{self.path}: the store's MoE layers are {_span(self.spec)}, those of {spec.name} "
                f"{_span(spec)}"
            )

    def describe(self) -> dict[str, Any]:
        """Return what a run's settings say of the store besides its geometry; safe for JSON."""
        return {
            "dtype": self.dtype,
            "activation": self.activation,
            "origin": self.origin,
            "weights": self.weights,
            "seed": self.seed,
            "digest": self.digest,
        }


class BlockViews(NamedTuple):
    """The parts of one block, or of many: matrices [..., block, d_model], biases [..., block].

    int8 matrices are of int8; int4 ones of uint8 [..., block, d_model / 2], the even of two columns
    in the low half of a byte. Both have scales.
    """

    gate: Any  # None where the model has no gate
    up: Any
    down: Any
    gate_bias: Any  # None where the model has none
    up_bias: Any
    scales: Any  # [..., matrices, block, d_model / 64]: in their order; None if not quantised


def view_blocks(buffer: Any, store: Store) -> BlockViews:
    """Return views of the parts of blocks as they were read; nothing is copied.

    buffer: a uint8 torch tensor [..., stride], for instance a slot or a pool [slots, stride].
    """
    spec, torch, at = store.spec, import_extra("torch"), 0
    quantised = store.dtype in BITS
    kind = torch.float16 if quantised else getattr(torch, TORCH_TYPES[store.dtype])
    numbers = {"int8": torch.int8, "int4": torch.uint8}.get(store.dtype, kind)
    columns = spec.d_model // 2 if store.dtype == "int4" else spec.d_model

    def part(kind: Any, *shape: int) -> Any:
        nonlocal at
        begin, at = at, at + math.prod(shape) * kind.itemsize
        return buffer[..., begin:at].view(kind).unflatten(-1, shape)

    gated = spec.matrices == 3
    gate = part(numbers, spec.block, columns) if gated else None
    up, down = (part(numbers, spec.block, columns) for _ in range(2))
    gate_bias = part(kind, spec.block) if spec.biases and gated else None
    up_bias = part(kind, spec.block) if spec.biases else None
    scales = part(kind, spec.matrices, spec.block, spec.d_model // GROUP) if quantised else None
    return BlockViews(gate, up, down, gate_bias, up_bias, scales)


class _Layer(NamedTuple):
    """A checked file of a layer: see the fields of `Store`."""

    path: Path
    offsets: tuple[int, ...]
    table: str


def _index(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the fields of store.json, whose types are checked, and its sha256."""
    path = folder / STORE_INDEX
    if not path.is_file():
        what = f"lacks {STORE_INDEX}" if folder.is_dir() else "is no folder"
        raise CrispError(f"{folder}: {what}; an expert store was expected (crisp pack makes one)")
    try:
        content = path.read_bytes()
        fields = json.loads(content)
    except OSError as error:
        raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CrispError(f"{path}: is not JSON: {reason_of(error)}") from error
    if not isinstance(fields, dict) or fields.get("version") != VERSION:
        version = fields.get("version") if isinstance(fields, dict) else None
        raise CrispError(
            f"{path}: is of version {version!r}, expected an expert store of {VERSION}"
        )
    for key, kinds in _FIELDS.items():
        if key not in fields or type(fields[key]) not in kinds:
            raise CrispError(
                f"{path}: {key} is {fields.get(key)!r:.40}, expected {kinds[0].__name__}"
            )
    for key in ("source", "errors"):
        if not isinstance(fields.get(key, {}), dict):
            raise CrispError(f"{path}: {key} is {fields[key]!r:.40}, expected dict")
    return fields, hashlib.sha256(content).hexdigest()


def _check(spec: ModelSpec, fields: Mapping[str, Any], where: str) -> None:
    """Raise CrispError for fields that do not make sense or do not fit the geometry."""
    choices = {"dtype": tuple(DTYPES), "origin": ORIGINS}
    for key, allowed in choices.items():
        if fields[key] not in allowed:
            raise CrispError(
                f"{where}: {key}: found {fields[key]!r}, expected {' or '.join(allowed)}"
            )
    try:
        activation = Activation.read(fields["activation"])
    except CrispError as error:
        raise CrispError(f"{where}: {error}") from error
    for name in ("n_experts", "d_model", "d_ff"):
        if getattr(spec, name) > _LARGEST:
            raise CrispError(f"{where}: {name}: expected at most {_LARGEST}")
    if spec.bits != DTYPES[fields["dtype"]] or (activation.gated and spec.matrices != 3):
        raise CrispError(
            f"{where}: {spec.matrices} matrices of {float(spec.bits):g} bits; 3 of "
            f"{fields['dtype']} were expected"
        )
    if fields["dtype"] in BITS and spec.d_model % GROUP:
        raise CrispError(
            f"{where}: d_model is {spec.d_model}, expected a multiple of {GROUP} in "
            f"{fields['dtype']}"
        )
    if len(fields["files"]) != len(spec.moe_layers):
        raise CrispError(
            f"{where}: names {len(fields['files'])} files, expected one for each of "
            f"{len(spec.moe_layers)} MoE layers"
        )


def _layer(
    folder: Path, where: str, spec: ModelSpec, kind: tuple[str, str], layer: int, entry: object
) -> _Layer:
    """Check a layer's file, up to its weights, against its entry in the index."""
    expected = {"layer": layer, "name": file_name(layer)}
    if not isinstance(entry, dict) or {key: entry.get(key) for key in expected} != expected:
        raise CrispError(f"{where}: files: found {entry!r:.80}, expected one with {expected}")
    path = folder / file_name(layer)
    first, size = _first_bytes(path)
    weights = spec.n_experts * spec.expert_bytes
    if size != len(first) + weights:
        raise CrispError(
            f"{path}: is {size} bytes, expected {len(first) + weights}: {len(first)} of header and "
            f"{weights} of weights"
        )
    if len(first) % PAGE:
        raise CrispError(f"{path}: weights begin at byte {len(first)}, no multiple of {PAGE}")
    if hashlib.sha256(first).hexdigest() != entry.get("header_sha256"):
        raise CrispError(
            f"{path}: its header is not the one {STORE_INDEX} names: of another store, or damaged"
        )
    try:
        content = json.loads(first[8:])
        table = content["__metadata__"]["hashes_sha256"]
        good = isinstance(table, str) and first == header(spec, layer, table, *kind)
    except (ValueError, RecursionError, KeyError, TypeError):
        good = False
    if not good:
        raise CrispError(
            f"{path}: its header is none of layer {layer}, {spec.n_experts} experts of "
            f"{spec.n_blocks} blocks of {spec.block_bytes} bytes"
        )
    starts = range(len(first), size, spec.expert_bytes)
    return _Layer(path, tuple(starts), table)


def _first_bytes(path: Path) -> tuple[bytes, int]:
    """Return a safetensors file's length and header, and the size of the file in bytes."""
    if not path.is_file():
        state = "is no file" if path.exists() else "is missing"
        raise CrispError(f"{path}: {state}; experts of a layer were expected")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = file.read(8)
            most = int.from_bytes(length, "little")
            if len(length) < 8 or most > min(size - 8, _LONGEST):
                raise CrispError(f"{path}: is no whole safetensors file ({size} bytes)")
            return length + file.read(most), size
    except OSError as error:
        raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error


def _span(spec: ModelSpec) -> str:
    layers = spec.moe_layers
    return f"{layers[0]} to {layers[-1]} ({len(layers)})"
