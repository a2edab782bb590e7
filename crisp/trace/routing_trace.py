"""RoutingTrace: the record of a model's routing, and its file (``*.trace.safetensors``)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.files import atomic
from crisp.trace import check, tensor_file
from crisp.trace.header import Header

PREFILL, DECODE = 0, 1  # phases
_STEP = 1 << 12  # rows copied or hashed at a time

Rows = slice | npt.NDArray[np.integer[Any] | np.bool_]


@dataclass(frozen=True, eq=False, kw_only=True)
class RoutingTrace:
    """The experts each token was routed to: one row a token, sorted by (sequence, position).

    ``experts`` is -1 where a layer is not MoE or an expert is absent (absent ones come last).
    ``guess`` is the prediction *for* a layer, made by its router from the input of the previous
    MoE layer. Weights and guesses of absent experts mean nothing. ``scores`` are the router's
    logits of all experts, before anything is done to choose among them; they mean nothing where a
    row has no expert. ``magnitudes`` are what was foretold of each expert's output for the token,
    relative to its mean (`crisp.policy.magnitude`).
    """

    experts: npt.NDArray[np.int16]  # [rows, layers, k], by falling router weight if `ordered`
    sequence: npt.NDArray[np.int32]  # [rows]
    position: npt.NDArray[np.int32]  # [rows], without gaps in a sequence
    phase: npt.NDArray[np.uint8]  # [rows]: 0 prefill, 1 decode
    header: Header
    weights: npt.NDArray[np.float16] | None = None  # [rows, layers, k]: as the model used them
    guess: npt.NDArray[np.int16] | None = None  # [rows, layers, k]
    token: npt.NDArray[np.int32] | None = None  # [rows]: the tokens' ids
    scores: npt.NDArray[np.float16] | None = None  # [rows, layers, experts]: router logits
    magnitudes: npt.NDArray[np.float16] | None = None  # [rows, layers, k]: as predicted

    @property
    def rows(self) -> int:
        """The number of tokens."""
        return int(self.experts.shape[0])

    @property
    def layers(self) -> int:
        """The number of layers of the model, MoE or not."""
        return int(self.experts.shape[1])

    @property
    def k(self) -> int:
        """The number of experts recorded for a token in a layer."""
        return int(self.experts.shape[2])

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers in which any row has an expert."""
        used = np.zeros(self.layers, np.bool_)
        for start in range(0, self.rows, _STEP):
            used |= (self.experts[start : start + _STEP, :, 0] >= 0).any(axis=0)
            if used.all():
                break
        return tuple(int(layer) for layer in np.flatnonzero(used))

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that are there, by name."""
        arrays = {name: getattr(self, name) for name in check.TENSORS}
        return {name: array for name, array in arrays.items() if array is not None}

    def select(self, rows: Rows) -> RoutingTrace:
        """Return the trace of some rows: views for a slice, copies for a mask or rising indices."""
        chosen = {name: array[rows] for name, array in self.tensors().items()}
        return RoutingTrace(header=self.header, **chosen)

    def first_layers(self, n: int) -> RoutingTrace:
        """Return the trace of the model's first ``n`` layers, as views."""
        if n == self.layers:
            return self
        by_layer = {"experts", "weights", "guess", "scores", "magnitudes"}
        return RoutingTrace(
            header=self.header,
            **{k: v[:, :n] if k in by_layer else v for k, v in self.tensors().items()},
        )

    def sequences(
        self,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (ids, starts, ends) [sequences]: rows [start, end) belong to sequence id.

        Ids ascend.
        """
        changes = np.flatnonzero(self.sequence[1:] != self.sequence[:-1]) + 1
        starts = np.concatenate([[0], changes]).astype(np.int64)[: self.rows]
        ends = np.concatenate([starts[1:], [self.rows]]).astype(np.int64)[: self.rows]
        return self.sequence[starts], starts, ends

    def digest(self) -> str:
        """Return the SHA-256 (hex) of what decides a run: all tensors, n_experts and ordered."""
        sums = hashlib.sha256()
        for name, array in self.tensors().items():
            sums.update(f"{name} {array.dtype} {array.shape}\n".encode())
            for start in range(0, self.rows, _STEP):
                sums.update(array[start : start + _STEP].tobytes())
        sums.update(f"n_experts {self.header.n_experts} ordered {self.header.ordered}".encode())
        return sums.hexdigest()

    def validate(self, name: str, release: Callable[[], None] = lambda: None) -> None:
        """Raise CrispError unless the trace keeps its promises (`crisp.trace.check`)."""
        check.validate(self.header, self.tensors(), name, release)

    def save(self, path: str | Path) -> None:
        """Write the trace file; raise CrispError for a trace that breaks a promise."""
        self.validate(str(path))
        layout = {name: (array.dtype, array.shape) for name, array in self.tensors().items()}
        with atomic(path) as temporary:
            mapped = tensor_file.create(temporary, self.header.to_metadata(), layout)
            for name, array in self.tensors().items():
                for start in range(0, self.rows, _STEP):
                    mapped.arrays[name][start : start + _STEP] = array[start : start + _STEP]
                mapped.release()

    @classmethod
    def load(cls, path: str | Path) -> RoutingTrace:
        """Map the trace file and check everything it promises, a few rows at a time.

        Raises CrispError that names the file, the row, the layer and what was found.
        """
        name = str(path)
        mapped = tensor_file.read(Path(path))
        header = Header.from_metadata(mapped.metadata, name)
        for tensor in mapped.arrays:
            if tensor not in check.TENSORS:
                raise CrispError(f"{name}: has a tensor '{tensor}'; no trace has")
        for tensor in check.TENSORS:
            if tensor not in mapped.arrays and tensor not in check.OPTIONAL:
                raise CrispError(f"{name}: lacks the tensor '{tensor}'")
        trace = cls(header=header, **mapped.arrays)
        trace.validate(name, mapped.release)
        return trace
