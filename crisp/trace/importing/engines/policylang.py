"""Logs of moe-policylang: what its ``record_trace`` writes, JSON lines or parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from crisp.errors import CrispError, reason_of, shorten
from crisp.trace import DECODE, PREFILL
from crisp.trace.importing.columns import list_matrix, whole_numbers
from crisp.trace.importing.engines.assembly import files
from crisp.trace.importing.engines.assembly.passes import pad_ids, pad_weights
from crisp.trace.importing.engines.assembly.rows import (
    Floats,
    Ints,
    LayerRecords,
    LoggedRows,
    assemble,
)
from crisp.trace.importing.engines.log import MOST_LAYERS, EngineLog, KnownSizes

_HEADER = ("num_layers", "num_experts", "top_k")
_COLUMNS = ("prompt_id", "token_idx", "layer_idx", "selected_experts")
_PHASES = {"prefill": PREFILL, "decode": DECODE}
_FLOOR = 1e-30  # a probability that was rounded to 0; its logarithm must be finite


def recognise(path: Path, head: bytes) -> bool:
    """Return whether the file is its JSON lines, by their header, or a parquet of its columns."""
    if files.is_text(head):
        first = head.split(b"\n", 1)[0]
        return all(f'"{key}"'.encode() in first for key in _HEADER) and b'"num_entries"' in first
    if not head.startswith(b"PAR1"):
        return False
    try:
        return set(_COLUMNS) <= set(pa.parquet.read_schema(path).names)
    except (pa.ArrowException, OSError):
        return False


def read(paths: Sequence[Path], sizes: KnownSizes) -> EngineLog:
    """Read a trace that record_trace wrote."""
    if len(paths) > 1:
        raise CrispError(f"{paths[1]}: one file of moe-policylang is read at a time")
    (path,) = paths
    with path.open("rb") as file:
        parquet = file.read(4) == b"PAR1"
    return _read_parquet(path, sizes) if parquet else _read_lines(path, sizes)


def _read_lines(path: Path, sizes: KnownSizes) -> EngineLog:
    """Read a header and lines of p(rompt), t(oken), l(ayer), e(xperts), s(cores), ph(ase)."""
    lines = files.json_lines(path)
    _, header = next(lines, (0, {}))
    said: dict[str, int] = {}
    for key in (*_HEADER, "num_entries"):
        value = header.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CrispError(f"{path}: the first line has no whole number '{key}'")
        said[key] = value
    if said["num_layers"] > MOST_LAYERS:
        raise CrispError(f"{path}: says {said['num_layers']:,} layers; impossible")
    full = bool(header.get("records_full_softmax"))
    keys: list[tuple[int, int, int]] = []
    experts: list[list[int]] = []
    scores: list[list[float]] = []
    phase: list[int] = []
    scored = phased = 0
    for number, line in lines:
        place = f"{path}: line {number}"
        try:
            keys.append((int(line["p"]), int(line["t"]), int(line["l"])))
            experts.append([int(expert) for expert in line["e"]])
            values = line.get("s")
            scored += bool(values)
            scores.append([float(score) for score in values or ()])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CrispError(
                f"{place}: expected numbers p, t, l and lists e, s; found {shorten(str(line))}"
            ) from error
        phased += "ph" in line
        phase.append(_phase(line.get("ph", "decode"), place))
    if len(keys) != said["num_entries"]:
        raise CrispError(
            f"{path}: the first line promises {said['num_entries']:,} entries, "
            f"{len(keys):,} are there; the file may be cut off"
        )
    if scored not in (0, len(keys)):
        raise CrispError(f"{path}: {scored:,} of {len(keys):,} lines have scores")
    try:
        prompt, token, layer = np.array(keys, np.int64).reshape(-1, 3).T
    except OverflowError as error:
        raise CrispError(f"{path}: a prompt, token or layer is out of range") from error
    return _finish(
        path,
        KnownSizes(said["num_experts"], said["num_layers"], said["top_k"]),
        LayerRecords(
            sequence=_renumber(prompt),
            position=token,
            layer=layer,
            phase=np.array(phase, np.uint8),
            experts=pad_ids(experts, str(path)),
            weights=pad_weights(scores) if scored and not full else None,
        ),
        pad_weights(scores, np.nan) if scored and full else None,
        [] if phased else ["no phases: all taken as decode"],
    )


def _read_parquet(path: Path, sizes: KnownSizes) -> EngineLog:
    try:
        table = pa.parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise CrispError(f"{path}: {reason_of(error)}") from error
    if missing := [name for name in _COLUMNS if name not in table.column_names]:
        raise CrispError(f"{path}: no column {', '.join(missing)}")
    table = table.combine_chunks()

    def column(name: str) -> Any:
        return (
            table.column(name).combine_chunks() if table.num_rows else table.column(name).chunk(0)
        )

    if not table.num_rows:
        raise CrispError(f"{path}: holds no routing")
    most = np.iinfo(np.int32).max
    prompt, token, layer = (whole_numbers(path, name, column(name), most) for name in _COLUMNS[:3])
    if layer.max() >= MOST_LAYERS:
        raise CrispError(f"{path}: layer {layer.max()} found; impossible")
    experts = list_matrix(path, "selected_experts", column("selected_experts"), None, whole=True)
    scores = None
    if "router_scores" in table.column_names:
        scores = list_matrix(path, "router_scores", column("router_scores"), None)
    full = scores is not None and scores.shape[1] > experts.shape[1]
    phase, notes = np.full(len(layer), DECODE, np.uint8), ["no phases: all taken as decode"]
    if "phase" in table.column_names:
        texts = column("phase").to_pylist()
        phase = np.array([_phase(text, f"{path}: column phase") for text in texts], np.uint8)
        notes = []
    return _finish(
        path,
        sizes,
        LayerRecords(
            sequence=_renumber(prompt),
            position=token,
            layer=layer,
            phase=phase,
            experts=experts.astype(np.int64),
            weights=None if scores is None or full else scores,
        ),
        scores if full else None,
        notes,
    )


def _finish(
    path: Path,
    sizes: KnownSizes,
    records: LayerRecords,
    softmax: Floats | None,
    notes: list[str],
) -> EngineLog:
    """Return the log of records; softmax [n, experts]: of all experts, where it was recorded."""
    rows = records.rows(str(path), sizes.n_layers)
    if softmax is not None:
        n_experts = sizes.n_experts or softmax.shape[1]
        sizes = sizes._replace(n_experts=n_experts)
        if softmax.shape[1] != n_experts or not ((softmax >= 0) & (softmax <= 1)).all():
            raise CrispError(
                f"{path}: the recorded softmax is no {n_experts} shares for each token and layer"
            )
        logs = np.log(np.maximum(softmax, _FLOOR)).astype(np.float16)
        placed = LayerRecords(
            sequence=records.sequence,
            position=records.position,
            layer=records.layer,
            phase=records.phase,
            experts=np.arange(len(logs))[:, None],
        ).rows(str(path), sizes.n_layers)
        index = placed.experts[..., 0]  # [rows, layers]: which record
        scores = np.where((index >= 0)[..., None], logs[index], np.float16(0))
        rows = LoggedRows(
            experts=rows.experts,
            sequence=rows.sequence,
            position=rows.position,
            phase=rows.phase,
            scores=scores,
        )
        notes = [*notes, "scores are logarithms of the recorded softmax"]
    return assemble(rows, "moe-policylang", path, sizes, notes)


def _phase(text: Any, name: str) -> int:
    if text not in _PHASES:
        raise CrispError(f"{name}: phase {shorten(repr(text))}; expected prefill or decode")
    return _PHASES[text]


def _renumber(prompt: Ints) -> Ints:
    """Return the prompts' ids numbered from 0, rising as they do."""
    numbers: Ints = np.unique(prompt, return_inverse=True)[1].reshape(-1)
    return numbers
