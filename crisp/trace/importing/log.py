"""Import of other engines' logs: their trace, fitted to the model, or one drawn from counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.files import check_writable
from crisp.model.spec import ModelSpec
from crisp.trace import RoutingTrace
from crisp.trace.counts import draw_from_counts
from crisp.trace.importing.engines import EngineLog, ExpertCounts, read_log
from crisp.trace.importing.table import Imported, note_top_k
from crisp.units import format_count


def import_log(
    paths: Sequence[Path],
    out: Path,
    engine: str,
    *,
    spec: ModelSpec | None = None,
    n_experts: int | None = None,
    n_layers: int | None = None,
    top_k: int | None = None,
    unordered: bool = False,
    dataset: str | None = None,
    tokenizer: str | None = None,
) -> Imported:
    """Write the log that ``engine`` left in ``paths`` as a trace to ``out``.

    The sizes of the model are those of ``spec``, where it is given, or ``n_experts``, ``n_layers``
    and ``top_k``, as far as the log does not say. Counts become a synthetic trace (see
    `crisp.trace.counts`). Raises CrispError for a log that is broken or does not fit the model.
    """
    check_writable(out)
    if spec is not None:
        n_experts, n_layers, top_k = spec.n_experts, spec.n_layers, top_k or spec.top_k
    log = read_log(paths, engine, n_experts=n_experts, n_layers=n_layers, top_k=top_k)
    name = str(paths[0])
    notes = list(log.notes)
    if isinstance(log, ExpertCounts):
        trace, records = _draw(log, name, spec, n_layers, top_k, notes), int(log.counts.sum())
    else:
        trace = _fit(log, name, spec, n_layers, notes)
        records = trace.rows + log.left_out
    header = replace(trace.header, dataset=dataset, tokenizer=tokenizer)
    if unordered:
        header = replace(header, ordered=False)
    if spec is not None:
        header = replace(header, model=spec.name, config_hash=spec.config_hash, spec=spec.to_dict())
        if trace.k != spec.top_k:
            notes.append(note_top_k(spec, trace.k, "log", out))
    else:
        dense = sorted(set(range(trace.layers)) - set(trace.moe_layers))
        if dense:
            shown = ", ".join(map(str, dense))
            notes.append(f"no routing in layer {shown}: taken as not MoE")
    trace = replace(trace, header=header)
    trace.save(out)
    return Imported(
        table_rows=records,
        rows=trace.rows,
        layers=trace.layers,
        k=trace.k,
        sequences=len(trace.sequences()[0]),
        dropped=0,
        notes=tuple(notes),
        drawn=isinstance(log, ExpertCounts),
    )


def _fit(
    log: EngineLog, name: str, spec: ModelSpec | None, n_layers: int | None, notes: list[str]
) -> RoutingTrace:
    trace = log.trace
    layers = _place_layers(name, trace.layers, trace.moe_layers, spec, n_layers, notes)
    if layers is None:
        return trace
    total = spec.n_layers if spec is not None else n_layers or trace.layers
    by_layer = {"experts": -1, "weights": 0, "guess": -1, "scores": 0}

    def placed(array: npt.NDArray[Any], empty: int) -> npt.NDArray[Any]:
        wide = np.full((trace.rows, total, array.shape[2]), empty, array.dtype)
        wide[:, layers] = array
        return wide

    tensors = {
        key: placed(array, by_layer[key]) if key in by_layer else array
        for key, array in trace.tensors().items()
    }
    return RoutingTrace(header=trace.header, **tensors)


def _draw(
    log: ExpertCounts,
    name: str,
    spec: ModelSpec | None,
    n_layers: int | None,
    top_k: int | None,
    notes: list[str],
) -> RoutingTrace:
    counts = log.counts
    if top_k is None:
        raise CrispError(
            f"{name}: counts do not say how many experts a token has; --model or --top-k does"
        )
    n_experts = counts.shape[1] if spec is None else spec.n_experts
    if counts.shape[1] > n_experts:
        raise CrispError(f"{name}: counts of {counts.shape[1]} experts, the model has {n_experts}")
    used = tuple(int(layer) for layer in np.flatnonzero(counts.any(axis=1)))
    layers = _place_layers(name, len(counts), used, spec, n_layers, notes)
    total = len(counts) if layers is None else (spec.n_layers if spec else n_layers or len(counts))
    wide = np.zeros((total, n_experts), np.int64)
    wide[list(range(len(counts))) if layers is None else layers, : counts.shape[1]] = counts
    trace = draw_from_counts(
        wide, top_k, note=f"drawn from the counts in {Path(name).name}, a log of {log.engine}"
    )
    notes.append(
        f"counts have no order: {format_count(trace.rows, 'row')} were drawn from them, "
        "independent of each other: a profile for tiers and the cache static, and a lower end "
        "for caches that live on what the last token used"
    )
    return trace


def _place_layers(
    name: str,
    n_logged: int,
    used: Sequence[int],
    spec: ModelSpec | None,
    n_layers: int | None,
    notes: list[str],
) -> list[int] | None:
    """Return the model's layer of each layer of the log; None where they are the same.

    n_logged: layers of the log; used: those with routing. Some engines count all layers, some the
    MoE ones alone. Raises CrispError where neither fits.
    """
    if spec is None:
        if n_layers in (None, n_logged):
            return None
        raise CrispError(f"{name}: has {n_logged} layers, --layers says {n_layers}")
    moe = spec.moe_layers
    if set(used) <= set(moe) and n_logged in (spec.n_layers, max(used, default=-1) + 1):
        lacking = sorted(set(moe) - set(used))
        if not lacking:
            return None if n_logged == spec.n_layers else list(range(n_logged))
        raise CrispError(f"{name}: layer {lacking[0]} of {spec.name} is MoE, but has no routing")
    if n_logged == len(moe) or (n_logged == spec.n_layers and max(used) < len(moe)):
        notes.append(
            f"the log counts MoE layers only: its {len(moe)} are layers {moe[0]} to {moe[-1]} of "
            f"{spec.name}"
        )
        return list(moe)
    raise CrispError(
        f"{name}: routing of {len(used)} layers ({min(used, default=0)} to "
        f"{max(used, default=0)}); {spec.name} has {len(moe)} MoE layers ({moe[0]} to {moe[-1]})"
    )
