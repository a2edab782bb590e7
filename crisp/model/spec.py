"""ModelSpec: the geometry of an MoE, and the bytes of an expert at a width."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from crisp.errors import CrispError, unknown_name
from crisp.model.builtin import CONFIGS
from crisp.model.by_hand import read_by_hand
from crisp.model.config import ConfigGeometry, read_config, read_json

PAGE = 4096  # bytes; a block's stride is a multiple, so that O_DIRECT and DMA work
STORE_INDEX = "store.json"  # what an expert store's folder holds beside its layers
BIAS_BITS = 16  # of a per-neuron bias in the store, at least: biases are not quantised


@dataclass(frozen=True)
class ModelSpec:
    """The layers, experts and bytes of one model. All counts are whole, all sizes exact.

    `bits` is the average over the routed experts' stored weights, group scales included;
    `layer_bits` are those of each MoE layer, where they differ; `dtype_bits` is for everything
    else. A *block* is `block` neurons of one expert (a row of the
    gate, a row of the up and a column of the down matrix each), the unit of storage, loading and
    of any width; the last block of an expert may be shorter but takes as many bytes.
    """

    name: str
    n_layers: int
    moe_layers: tuple[int, ...]
    n_experts: int  # routed experts of a MoE layer
    top_k: int
    d_model: int
    d_ff: int  # neurons of one routed expert
    dtype_bits: int
    bits: Fraction
    matrices: int  # of one expert: 3 with a gate, 2 without
    biases: bool  # per-neuron biases of gate and up
    dense_params: tuple[int, ...]  # per layer: what a token reads outside the routed experts
    block: int
    config_hash: str | None  # sha256 over the geometry of the config; None where there was none
    layer_bits: tuple[Fraction, ...] | None = None  # [MoE layers]; None: `bits` in all of them

    def __post_init__(self) -> None:
        def must(good: bool, key: str, expected: str) -> None:
            if not good:
                value = getattr(self, key)
                raise CrispError(f"model {self.name}: {key} is {value}, expected {expected}")

        for key in ("n_layers", "n_experts", "top_k", "d_model", "d_ff", "dtype_bits", "block"):
            must(getattr(self, key) >= 1, key, "at least 1")
        most = 16 * -(-self.d_ff // 16)
        must(self.block <= most, "block", f"at most {most}, a whole expert")
        must(self.top_k <= self.n_experts, "top_k", f"at most {self.n_experts} experts")
        must(self.matrices in (2, 3), "matrices", "2 or 3")
        must(0 < self.bits <= 64, "bits", "more than 0 and at most 64")
        layers = self.moe_layers
        must(
            bool(layers) and _ascending((-1, *layers, self.n_layers)),
            "moe_layers",
            f"ascending layers below {self.n_layers}, at least one",
        )
        must(
            len(self.dense_params) == self.n_layers and min(self.dense_params) >= 0,
            "dense_params",
            f"{self.n_layers} numbers, none negative",
        )
        each = self.layer_bits
        if each is not None:
            must(
                len(each) == len(layers) and all(0 < bits <= 64 for bits in each),
                "layer_bits",
                f"{len(layers)} numbers of more than 0 and at most 64",
            )
            must(sum(each) == self.bits * len(each), "bits", "the average of layer_bits")

    # -- sizes -----------------------------------------------------------------------------------

    @cached_property
    def n_blocks(self) -> int:
        """The number of blocks of one expert."""
        return -(-self.d_ff // self.block)

    @cached_property
    def row_block_bytes(self) -> tuple[int, ...]:
        """The bytes of one block in each MoE layer: its stride in the store, padding included."""
        each = self.layer_bits or (self.bits,) * len(self.moe_layers)
        return tuple(self._stride(bits) for bits in each)

    @cached_property
    def block_bytes(self) -> int:
        """The bytes of one block: of the largest, where layers differ, so that any fits."""
        return max(self.row_block_bytes)

    def block_bytes_of(self, layer: int) -> int:
        """Return the bytes of one block of a MoE layer."""
        return self.row_block_bytes[self.moe_layers.index(layer)]

    @cached_property
    def expert_bytes(self) -> int:
        """The bytes of one routed expert at full width: of the largest, where layers differ."""
        return self.n_blocks * self.block_bytes

    @cached_property
    def n_routed(self) -> int:
        """The number of routed experts of the whole model."""
        return len(self.moe_layers) * self.n_experts

    @cached_property
    def routed_bytes(self) -> int:
        """The bytes of all routed experts: what a budget in percent is a share of."""
        return self.n_experts * self.n_blocks * sum(self.row_block_bytes)

    @property
    def mean_block_bytes(self) -> float:
        """The bytes of one block, on average over the layers."""
        if self.layer_bits is None:
            return self.block_bytes
        return self.routed_bytes / (self.n_routed * self.n_blocks)

    def _stride(self, weight_bits: Fraction) -> int:
        """Return the bytes of a block whose weights take so many bits."""
        bits = self.block * self.matrices * self.d_model * weight_bits
        if self.biases:
            bits += self.block * (self.matrices - 1) * max(weight_bits, Fraction(BIAS_BITS))
        return PAGE * math.ceil(bits / (8 * PAGE))

    def neurons(self, first: int, last: int) -> int:
        """Return the neurons in blocks [first, last); an expert's last block may be shorter."""
        return min(last * self.block, self.d_ff) - min(first * self.block, self.d_ff)

    def width(self, share: Fraction) -> int:
        """Return the smallest number of whole blocks that holds at least `share` of the neurons.

        Raises CrispError unless 0 <= share <= 1.
        """
        if not 0 <= share <= 1:
            raise CrispError(f"a width of {share} was requested; expected 0 to 1")
        return math.ceil(share * self.d_ff / self.block)

    # -- variants --------------------------------------------------------------------------------

    def first_layers(self, n: int) -> ModelSpec:
        """Return this model cut to its first `n` layers."""
        if not 1 <= n <= self.n_layers:
            raise CrispError(f"model {self.name}: has {self.n_layers} layers, {n} were requested")
        moe_layers = tuple(layer for layer in self.moe_layers if layer < n)
        dense_params = self.dense_params[:n]
        cut = self
        if self.layer_bits is not None and moe_layers:
            cut = self.with_layer_bits(self.layer_bits[: len(moe_layers)], moe_layers)
        return dataclasses.replace(
            cut, n_layers=n, moe_layers=moe_layers, dense_params=dense_params
        )

    def with_layer_bits(
        self, bits: Sequence[Fraction], moe_layers: tuple[int, ...] | None = None
    ) -> ModelSpec:
        """Return this model with the stored bits of each MoE layer.

        moe_layers: the layers they are of; None: its own.
        """
        each = tuple(bits)
        return dataclasses.replace(
            self,
            moe_layers=self.moe_layers if moe_layers is None else moe_layers,
            bits=Fraction(sum(each), max(len(each), 1)),
            layer_bits=None if len(set(each)) == 1 else each,
        )

    def at_layer(self, layer: int) -> ModelSpec:
        """Return this model with the stored bits of one MoE layer in all of them."""
        if self.layer_bits is None:
            return self
        return self.with_(bits=self.layer_bits[self.moe_layers.index(layer)])

    def with_(
        self, *, bits: Fraction | None = None, block: int | None = None, top_k: int | None = None
    ) -> ModelSpec:
        """Return this model with other neurons per block or experts per token, or other stored
        bits, then the same in all layers.
        """
        return dataclasses.replace(
            self,
            bits=self.bits if bits is None else bits,
            layer_bits=self.layer_bits if bits is None else None,
            block=self.block if block is None else block,
            top_k=self.top_k if top_k is None else top_k,
        )

    # -- as JSON ---------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return every field, safe for JSON: tuples as lists, fractions as text.

        `layer_bits` only where layers differ, so that earlier versions read all other models.
        """
        fields = dataclasses.asdict(self)
        fields["bits"] = str(self.bits)
        if self.layer_bits is None:
            del fields["layer_bits"]
        else:
            fields["layer_bits"] = [str(bits) for bits in self.layer_bits]
        fields["moe_layers"] = list(self.moe_layers)
        fields["dense_params"] = list(self.dense_params)
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], where: str = "model") -> ModelSpec:
        """Return the spec of a `to_dict`; `where` names the source in errors."""
        values = {"layer_bits": None, **fields}
        kinds = {field.name: str(field.type) for field in dataclasses.fields(cls)}
        for key in sorted(kinds.keys() ^ values.keys()):
            state = "missing" if key in kinds else "not known"
            raise CrispError(f"{where}: the field {key} of the model is {state}")
        for key, value in values.items():
            if not _CHECKS[kinds[key]](value):
                raise CrispError(f"{where}: {key}: found {value!r}, expected {kinds[key]}")
            if kinds[key] == "tuple[int, ...]":
                values[key] = tuple(value)
        values["bits"] = Fraction(values["bits"])
        if values["layer_bits"] is not None:
            values["layer_bits"] = tuple(map(Fraction, values["layer_bits"]))
        return cls(**values)

    # -- from outside ----------------------------------------------------------------------------

    @classmethod
    def from_config(
        cls, source: str | Path | Mapping[str, Any], name: str | None = None
    ) -> ModelSpec:
        """Read the model of a Hugging Face config: a folder with config.json, a file or a dict.

        The name is `name`, else the folder's (of a dict: the last part of its `_name_or_path`,
        else its `model_type`). Raises CrispError naming the file and the key.
        """
        return cls.from_geometry(*read_config(source, name))

    @classmethod
    def from_geometry(
        cls, geometry: ConfigGeometry, name: str, config_hash: str | None = None
    ) -> ModelSpec:
        """Return the model of a config's geometry; config_hash: None: that of the geometry."""
        keys = {field.name for field in dataclasses.fields(cls)}
        return cls(
            name=name,
            block=math.ceil(Fraction(geometry.d_ff, 8 * 16)) * 16,
            config_hash=config_hash or geometry.digest(),
            **{key: value for key, value in vars(geometry).items() if key in keys},
        )

    @classmethod
    def named(cls, name_or_path: str | Path) -> ModelSpec:
        """Return a built-in model by name, or read a config, an expert store or a TOML file.

        Raises CrispError with the nearest built-in name.
        """
        if str(name_or_path) in BUILTIN:
            return BUILTIN[str(name_or_path)]
        index = Path(name_or_path) / STORE_INDEX
        if index.exists():
            return cls.from_dict(read_json(index).get("spec", {}), str(index))
        if Path(name_or_path).suffix == ".toml":
            fields = read_by_hand(Path(name_or_path))
            try:
                return cls(**fields)
            except CrispError as error:
                raise CrispError(f"{name_or_path}: {error}") from error
        if Path(name_or_path).exists():
            return cls.from_config(name_or_path)
        raise unknown_name(str(name_or_path), BUILTIN, "model")


def _ascending(layers: tuple[int, ...]) -> bool:
    return list(layers) == sorted(set(layers))


def _whole(value: object) -> bool:
    return type(value) is int


def _fraction(value: object) -> bool:
    # as `str` writes one; an exponent could ask for more digits than there is memory
    return isinstance(value, str) and re.fullmatch(r"\d{1,15}(/[1-9]\d{0,14})?", value) is not None


# what `from_dict` accepts for a field, by its annotation
_CHECKS: dict[str, Callable[[object], bool]] = {
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "int": _whole,
    "bool": lambda value: isinstance(value, bool),
    "Fraction": _fraction,
    "tuple[int, ...]": lambda value: isinstance(value, list) and all(map(_whole, value)),
    "tuple[Fraction, ...] | None": lambda value: (
        value is None or (isinstance(value, list) and all(map(_fraction, value)))
    ),
}


BUILTIN = {name: ModelSpec.from_config(config, name) for name, config in CONFIGS.items()}
