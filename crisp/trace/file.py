"""RoutingTrace: the record of a model's routing, and its file (``*.trace.safetensors``)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp import TOOL
from crisp.errors import CrispError
from crisp.files import atomic
from crisp.trace import check, store

VERSION = 1
PREFILL, DECODE = 0, 1  # phases
_FORMAT = "crisp-trace"
_STEP = 1 << 12  # rows copied or hashed at a time

Rows = slice | npt.NDArray[np.integer[Any] | np.bool_]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Header:
    """Where a trace comes from. What is not known is None and absent from the file."""

    n_experts: int  # routed experts of a MoE layer
    top_k: int  # experts recorded of a token and layer
    ordered: bool  # each row's experts are sorted by falling router weight
    origin: str  # 'captured', 'imported' or 'synthetic'
    seed: int | None = None  # of a synthetic trace, or of sampling
    model: str | None = None
    revision: str | None = None
    config_hash: str | None = None
    dataset: str | None = None
    tokenizer: str | None = None
    spec: dict[str, Any] | None = None  # ModelSpec.to_dict() of the traced model
    note: str | None = None
    version: int = VERSION
    tool: str = TOOL
    time: str = field(default_factory=_now)

    def to_metadata(self) -> dict[str, str]:
        """The header as safetensors metadata: text as it is, everything else as JSON."""
        values = {key: value for key, value in vars(self).items() if value is not None}
        text = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
        return {"format": _FORMAT, **text}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], name: str) -> Header:
        """The inverse; ``name`` is the file's in errors. Another version is an error."""
        if metadata.get("format") != _FORMAT:
            raise CrispError(f"{name}: not a routing trace (its metadata has no {_FORMAT} format)")
        if metadata.get("version") != str(VERSION):
            found = metadata.get("version")
            raise CrispError(f"{name}: trace format version {found}; this reads {VERSION}")
        values: dict[str, Any] = {}
        for key in dataclasses.fields(cls):
            text = metadata.get(key.name)
            kind = str(key.type).removesuffix(" | None")
            if text is None:
                if str(key.type) == kind:
                    raise CrispError(f"{name}: header lacks '{key.name}'")
                continue
            values[key.name] = text if kind == "str" else _decode(text, kind, key.name, name)
        return cls(**values)


def _decode(text: str, kind: str, key: str, name: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if type(value) is not {"int": int, "bool": bool}.get(kind, dict):
        raise CrispError(f"{name}: header: {key} is '{text}'; expected {kind.split('[')[0]}")
    return value


@dataclass(frozen=True, eq=False, kw_only=True)
class RoutingTrace:
    """Which experts every token was routed to, one row a token, sorted by (sequence, position).

    ``experts`` is -1 where a layer is not MoE or an expert is absent (absent ones come last).
    ``guess`` is the prediction *for* a layer, made by its router from the input of the previous
    MoE layer. Weights and guesses of absent experts mean nothing.
    """

    experts: npt.NDArray[np.int16]  # [rows, layers, k], by falling router weight if `ordered`
    sequence: npt.NDArray[np.int32]  # [rows]
    position: npt.NDArray[np.int32]  # [rows], without gaps in a sequence
    phase: npt.NDArray[np.uint8]  # [rows]: 0 prefill, 1 decode
    header: Header
    weights: npt.NDArray[np.float16] | None = None  # [rows, layers, k]: as the model used them
    guess: npt.NDArray[np.int16] | None = None  # [rows, layers, k]
    token: npt.NDArray[np.int32] | None = None  # [rows]: the tokens' ids

    @property
    def rows(self) -> int:
        """Tokens."""
        return int(self.experts.shape[0])

    @property
    def layers(self) -> int:
        """Layers of the model, MoE or not."""
        return int(self.experts.shape[1])

    @property
    def k(self) -> int:
        """Experts recorded of a token and layer."""
        return int(self.experts.shape[2])

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers in which any row has an expert."""
        found = np.zeros(self.layers, np.bool_)
        for start in range(0, self.rows, _STEP):
            found |= (self.experts[start : start + _STEP, :, 0] >= 0).any(axis=0)
            if found.all():
                break
        return tuple(int(layer) for layer in np.flatnonzero(found))

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that are there, by name."""
        arrays = {name: getattr(self, name) for name in check.TENSORS}
        return {name: array for name, array in arrays.items() if array is not None}

    def select(self, rows: Rows) -> RoutingTrace:
        """The trace of some rows: views for a slice, copies for a mask or rising indices."""
        chosen = {name: array[rows] for name, array in self.tensors().items()}
        return RoutingTrace(header=self.header, **chosen)

    def first_layers(self, n: int) -> RoutingTrace:
        """The trace of the model's first ``n`` layers: views."""
        if n == self.layers:
            return self
        by_layer = {"experts", "weights", "guess"}
        return RoutingTrace(
            header=self.header,
            **{k: v[:, :n] if k in by_layer else v for k, v in self.tensors().items()},
        )

    def sequences(
        self,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(ids, starts, ends), one each a sequence, ascending: its rows are [start, end)."""
        changes = np.flatnonzero(self.sequence[1:] != self.sequence[:-1]) + 1
        starts = np.concatenate([[0], changes]).astype(np.int64)[: self.rows]
        ends = np.concatenate([starts[1:], [self.rows]]).astype(np.int64)[: self.rows]
        return self.sequence[starts], starts, ends

    def digest(self) -> str:
        """SHA-256 (hex) of what decides a run: all tensors, n_experts and ordered."""
        sums = hashlib.sha256()
        for name, array in self.tensors().items():
            sums.update(f"{name} {array.dtype} {array.shape}\n".encode())
            for start in range(0, self.rows, _STEP):
                sums.update(array[start : start + _STEP].tobytes())
        sums.update(f"n_experts {self.header.n_experts} ordered {self.header.ordered}".encode())
        return sums.hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the trace file; a trace that breaks a promise is refused."""
        check.validate(self, str(path))
        layout = {name: (array.dtype, array.shape) for name, array in self.tensors().items()}
        with atomic(path) as temporary:
            mapped = store.create(temporary, self.header.to_metadata(), layout)
            for name, array in self.tensors().items():
                for start in range(0, self.rows, _STEP):
                    mapped.arrays[name][start : start + _STEP] = array[start : start + _STEP]
                mapped.release()

    @classmethod
    def load(cls, path: str | Path) -> RoutingTrace:
        """Map the trace file and check everything it promises (a few rows at a time).

        Raises CrispError that names the file, the row, the layer and what was found.
        """
        name = str(path)
        mapped = store.read(Path(path))
        header = Header.from_metadata(mapped.metadata, name)
        for tensor in mapped.arrays:
            if tensor not in check.TENSORS:
                raise CrispError(f"{name}: has a tensor '{tensor}'; no trace has")
        for tensor in check.TENSORS:
            if tensor not in mapped.arrays and tensor not in check.OPTIONAL:
                raise CrispError(f"{name}: lacks the tensor '{tensor}'")
        trace = cls(header=header, **mapped.arrays)
        check.validate(trace, name, mapped.release)
        return trace
