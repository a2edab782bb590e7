"""From what an engine logged, row by row or record by record, to a checked trace in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.errors import CrispError
from crisp.trace import DECODE, PREFILL, Header, RoutingTrace
from crisp.trace.importing.engines.log import MOST_LAYERS, EngineLog, KnownSizes
from crisp.trace.importing.ordering import sort_experts
from crisp.units import format_count

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_MOST = 1 << 31  # bytes of the experts of a log's trace, kept in memory


@dataclass(frozen=True, eq=False, kw_only=True)
class LoggedRows:
    """One row a token, as an engine logged it: in any order, nothing checked yet."""

    experts: Ints  # [rows, layers, k]: -1 where there is no record
    sequence: Ints  # [rows], not negative
    position: Ints  # [rows], not negative
    phase: NDArray[np.uint8]  # [rows]
    weights: Floats | None = None  # [rows, layers, k]
    scores: NDArray[np.float16] | None = None  # [rows, layers, experts of a layer]
    ordered: bool = True  # experts stand by falling weight, or are sorted by `weights` here


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerRecords:
    """One record a token and layer, as an engine logged it: in any order, nothing checked yet."""

    sequence: Ints  # [n], not negative
    position: Ints  # [n], not negative
    layer: Ints  # [n], not negative
    phase: NDArray[np.uint8]  # [n]
    experts: Ints  # [n, k]: -1 where absent
    weights: Floats | None = None  # [n, k]
    ordered: bool = True

    def rows(self, name: str, n_layers: int | None = None) -> LoggedRows:
        """Return a row for each (sequence, position); a layer without a record is -1.

        name: of the log, in errors; n_layers: as many as the log has, if None. Raises CrispError
        for a layer that the model lacks, and for one that a token has twice.
        """
        if not len(self.layer):
            raise CrispError(f"{name}: holds no routing")
        layers = int(self.layer.max()) + 1
        if n_layers is not None and layers > n_layers:
            raise CrispError(f"{name}: layer {layers - 1} found; the model has {n_layers} layers")
        layers = n_layers or layers
        keys, first, row = np.unique(
            np.stack([self.sequence, self.position], axis=1),
            axis=0,
            return_index=True,
            return_inverse=True,
        )
        row = row.reshape(-1)
        _check_size(name, len(keys), layers, self.experts.shape[1])
        slot = row * layers + self.layer
        if len(np.unique(slot)) < len(slot):
            order = np.argsort(slot, kind="stable")
            at = int(order[np.flatnonzero(np.diff(slot[order]) == 0)[0]])
            raise CrispError(
                f"{name}: sequence {self.sequence[at]}, position {self.position[at]} has layer "
                f"{self.layer[at]} twice"
            )

        def placed(values: NDArray[Any], empty: float) -> NDArray[Any]:
            out = np.full((len(keys) * layers, values.shape[1]), empty, values.dtype)
            out[slot] = values
            return out.reshape(len(keys), layers, -1)

        return LoggedRows(
            experts=placed(self.experts, -1),
            sequence=keys[:, 0],
            position=keys[:, 1],
            phase=self.phase[first],
            weights=None if self.weights is None else placed(self.weights, 0),
            ordered=self.ordered,
        )


def split_at_restarts(position: Ints, layer: Ints) -> Ints:
    """Return the sequence of each record [n]: a new one where a layer's positions restart.

    Records of one layer stand in the order of their tokens, whatever the layers' order is.
    """
    sequence = np.empty(len(position), np.int64)
    for number in np.unique(layer):
        at = np.flatnonzero(layer == number)
        sequence[at] = np.cumsum(np.diff(position[at], prepend=position[at[:1]] - 1) <= 0)
    return sequence


def blank_equal_ids(experts: Ints) -> tuple[Ints, int]:
    """Return experts [rows, layers, k] with -1 for every k equal ids, and how many rows had them.

    An engine that fills buffers of zeros leaves a layer it did not write as k times expert 0. With
    k of 1 only a layer that is 0 in all rows can be told from one that was written.
    """
    if experts.shape[2] > 1:
        equal = (experts == experts[..., :1]).all(axis=2) & (experts[..., 0] >= 0)
    else:
        equal = np.broadcast_to((experts == 0).all(axis=0).T, experts.shape[:2])
    blanked = np.where(equal[..., None], -1, experts)
    return blanked, int((equal.any(axis=1) & (blanked < 0).all(axis=(1, 2))).sum())


def assemble(
    rows: LoggedRows,
    engine: str,
    path: Path,
    sizes: KnownSizes,
    notes: Sequence[str] = (),
    expert_bytes: tuple[int, ...] | None = None,
) -> EngineLog:
    """Check what was logged, put it in order, and return it as a log with its trace.

    Rows without any expert are left out and counted. Where positions have a gap, a new sequence
    begins. Sequences are numbered anew, in their order. Raises CrispError, one line, for ids out
    of range, an expert twice in a row, a position twice in a sequence.
    """
    name = str(path)
    n_experts = needed(sizes.n_experts, name, "experts a layer has", "--experts")
    experts, weights = _check_experts(rows, name, n_experts)
    _check_size(name, *experts.shape)
    told = list(notes)

    empty = (experts < 0).all(axis=(1, 2))
    kept = np.flatnonzero(~empty)
    if not len(kept):
        raise CrispError(f"{name}: no row has an expert")
    if empty.any():
        told.append(
            f"{format_count(int(empty.sum()), 'row')} without any expert (padding, or not "
            "captured): left out"
        )
    order = kept[np.lexsort((rows.position[kept], rows.sequence[kept]))]
    sequence, position, splits = _number_sequences(rows.sequence[order], rows.position[order], name)
    if splits:
        told.append(f"tokens are missing inside sequences: {splits} new sequences begun")
    experts, phase = experts[order], rows.phase[order]
    weights = None if weights is None else weights[order]
    if rows.ordered and weights is not None:
        resorted = sort_experts(
            experts.reshape(-1, experts.shape[2]), weights.reshape(-1, experts.shape[2]), True
        )
        if resorted:
            told.append(f"{format_count(resorted, 'row')} of a layer sorted by weight")

    recorded = experts[..., 0] >= 0  # [rows, layers]
    moe = recorded.any(axis=0)
    absent = int((~recorded[:, moe]).sum())
    if absent:
        told.append(_describe_absent(recorded, np.asarray(moe), phase))
    with np.errstate(over="ignore"):  # becomes infinite, which is refused below
        tensors: dict[str, Any] = {
            "weights": None if weights is None else weights.astype(np.float16),
            "scores": None if rows.scores is None else rows.scores[order],
        }
    trace = RoutingTrace(
        experts=experts.astype(np.int16),
        sequence=sequence.astype(np.int32),
        position=position.astype(np.int32),
        phase=phase.astype(np.uint8),
        header=Header(
            n_experts=n_experts,
            top_k=experts.shape[2],
            ordered=rows.ordered,
            origin="imported",
            note=f"imported from {path.name}, a log of {engine}",
        ),
        **{key: value for key, value in tensors.items() if value is not None},
    )
    trace.validate(name)
    return EngineLog(
        engine=engine,
        trace=trace,
        expert_bytes=expert_bytes,
        absent=absent,
        left_out=int(empty.sum()),
        notes=tuple(told),
    )


def needed(value: int | None, name: str, what: str, option: str) -> int:
    """Return a size that the log does not hold; CrispError if nobody told it."""
    if value is None:
        raise CrispError(
            f"{name}: does not say how many {what}; --model does, or crisp trace import {option}"
        )
    return value


def phases(position: Ints, prompt: int) -> NDArray[np.uint8]:
    """Return the phases of tokens [n] of which those at positions below ``prompt`` are prefill."""
    return np.where(position < prompt, PREFILL, DECODE).astype(np.uint8)


def _check_size(name: str, rows: int, layers: int, k: int) -> None:
    if layers > MOST_LAYERS or rows * layers * k * 8 > _MOST:
        raise CrispError(
            f"{name}: {rows:,} rows of {layers:,} layers, {k} experts each, are more than a log "
            "is read into memory for; a long table (--from table) is read piece by piece"
        )


def _check_experts(rows: LoggedRows, name: str, n_experts: int) -> tuple[Ints, Floats | None]:
    """Return experts [rows, layers, k] and weights, absent ones last, with the least k possible."""
    experts, weights = rows.experts, rows.weights

    def place(row: int, layer: int) -> str:
        return (
            f"{name}: sequence {rows.sequence[row]}, position {rows.position[row]}, layer {layer}"
        )

    bad = (experts < -1) | (experts >= n_experts)
    if bad.any():
        row, layer, rank = (int(i) for i in np.argwhere(bad)[0])
        raise CrispError(
            f"{place(row, layer)}: expert {experts[row, layer, rank]} found; expected 0 to "
            f"{n_experts - 1}"
        )
    last = np.argsort(experts < 0, axis=2, kind="stable")
    experts = np.take_along_axis(experts, last, 2)
    weights = None if weights is None else np.take_along_axis(weights, last, 2)
    k = max(1, int((experts >= 0).any(axis=(0, 1)).sum()))
    experts = np.ascontiguousarray(experts[..., :k])
    if weights is not None:
        weights = np.where(experts < 0, 0, weights[..., :k])
    ids = np.sort(experts, axis=2)
    twice = ((ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] >= 0)).any(axis=2)
    if twice.any():
        row, layer = (int(i) for i in np.argwhere(twice)[0])
        shown = ", ".join(map(str, experts[row, layer]))
        raise CrispError(f"{place(row, layer)}: experts [{shown}]; one of them twice")
    return experts, weights


def _number_sequences(sequence: Ints, position: Ints, name: str) -> tuple[Ints, Ints, int]:
    """Return (sequences from 0, positions, gaps) of rows sorted by both; gaps begin a new one."""
    if len(position) and (position.min() < 0 or position.max() > np.iinfo(np.int32).max):
        raise CrispError(
            f"{name}: position {position.max() if position.min() >= 0 else position.min()} found; "
            f"expected 0 to {np.iinfo(np.int32).max}"
        )
    fresh = np.diff(sequence, prepend=sequence[:1] - 1) != 0
    step = np.diff(position, prepend=0)
    if (again := ~fresh & (step == 0)).any():
        at = int(again.argmax())
        raise CrispError(f"{name}: sequence {sequence[at]} has position {position[at]} twice")
    broken = ~fresh & (step != 1)
    return np.cumsum(fresh | broken) - 1, position, int(broken.sum())


def _describe_absent(
    recorded: NDArray[np.bool_], moe: NDArray[np.bool_], phase: NDArray[np.uint8]
) -> str:
    """Return the note about (row, MoE layer)s without a record; recorded [rows, layers]."""
    layers = np.flatnonzero(moe)
    lacking = ~recorded[:, moe]
    count, rows = int(lacking.sum()), int(lacking.any(axis=1).sum())
    text = f"{rows:,} of {len(recorded):,} rows lack {count:,} MoE layer{'s' * (count != 1)}"
    if not lacking[:, :-1].any() and (phase[lacking[:, -1]] == PREFILL).all():
        text += f": layer {layers[-1]} was not run for all tokens of prompts (it was pruned)"
    return f"{text}: no expert is run there"
