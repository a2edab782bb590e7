"""Logs of llama.cpp: traces of its moe-trace examples, and counts of its importance matrices."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from crisp.errors import CrispError, reason_of
from crisp.model.gguf_header import read_header
from crisp.trace import DECODE, PREFILL
from crisp.trace.importing.engines.assembly import files
from crisp.trace.importing.engines.assembly.counts import count_experts
from crisp.trace.importing.engines.assembly.passes import number_passes, place_passes
from crisp.trace.importing.engines.assembly.rows import (
    Floats,
    Ints,
    LayerRecords,
    LoggedRows,
    assemble,
    split_at_restarts,
)
from crisp.trace.importing.engines.log import MOST_EXPERTS, EngineLog, ExpertCounts, KnownSizes

_GGUF = b"GGUF"
_ACTIVATIONS = "layer,expert"
_RANKS = "phase,token,layer,rank,expert"
_TRACE = re.compile(rb"(#[^\n]*\n)*-?\d+,\d+(,-?\d+)+\r?\n")
_COUNTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight\.counts")
_UNLIKELY = math.log(1e-6)


def recognise(path: Path, head: bytes) -> bool:
    """Return whether the file is a moe-trace CSV, with or without a header, or an imatrix."""
    if head.startswith(_GGUF):
        return b"imatrix" in head
    first = head.split(b"\n", 1)[0].strip().decode(errors="replace")
    return files.is_text(head) and (
        first in (_ACTIVATIONS, _RANKS) or (bool(_TRACE.match(head)) and path.suffix == ".csv")
    )


def read(paths: Sequence[Path], sizes: KnownSizes) -> EngineLog | ExpertCounts:
    """Read a moe-trace CSV in any of its three layouts, or an importance matrix (GGUF)."""
    if len(paths) > 1:
        raise CrispError(f"{paths[1]}: one file of llama.cpp is read at a time")
    (path,) = paths
    with path.open("rb") as file:
        head = file.read(256)
    if head.startswith(_GGUF):
        return _read_imatrix(path)
    first = head.split(b"\n", 1)[0].strip().decode(errors="replace")
    if first == _ACTIVATIONS:
        return _read_activations(path, sizes)
    records = _read_ranks(path) if first == _RANKS else _read_trace(path)
    rows = records.rows(str(path), sizes.n_layers)
    _refuse_strided(rows, str(path), sizes.n_experts)
    return assemble(rows, "llama.cpp", path, sizes)


def _read_trace(path: Path) -> LayerRecords:
    """Read ``pos,layer,id0..``: the prompt's positions are negative, up to -1."""
    columns = _columns(path, header=False)
    if len(columns) < 3:
        raise CrispError(f"{path}: {len(columns)} columns; expected position, layer and experts")
    position, layer, *ranks = columns.values()
    _check_layers(layer, path)
    sequence = split_at_restarts(position, layer)
    prompt = position < 0
    first = np.zeros(int(sequence.max(initial=0)) + 1, np.int64)
    np.minimum.at(first, sequence, position)
    return LayerRecords(
        sequence=sequence,
        position=position - first[sequence],
        layer=layer,
        phase=np.where(prompt, PREFILL, DECODE).astype(np.uint8),
        experts=np.stack(ranks, axis=1),
    )


def _read_ranks(path: Path) -> LayerRecords:
    """Read ``phase,token,layer,rank,expert``, of one sequence or of several after each other."""
    columns = _columns(path, header=True, texts=("phase",))
    phase, token, layer, rank, expert = (columns[name] for name in _RANKS.split(","))
    for number in np.flatnonzero(~np.isin(phase, ("prefill", "decode")))[:1]:
        raise CrispError(f"{path}: phase '{phase[number]}' found; expected prefill or decode")
    _check_layers(layer, path)
    if len(token) and (token.min() < 0 or rank.min() < 0 or rank.max() > 1 << 10):
        raise CrispError(f"{path}: a token or a rank is negative, or a rank beyond 1,024")
    # A record is a run of rows with the same token and layer, ranks rising.
    starts = np.flatnonzero(
        (np.diff(token, prepend=-1) != 0)
        | (np.diff(layer, prepend=-1) != 0)
        | (np.diff(rank, prepend=0) <= 0)
    )
    record = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(token)))
    experts = np.full((len(starts), int(rank.max(initial=0)) + 1), -1, np.int64)
    experts[record, rank] = expert
    return LayerRecords(
        sequence=split_at_restarts(token[starts], layer[starts]),
        position=token[starts],
        layer=layer[starts],
        phase=np.where(phase[starts] == "decode", DECODE, PREFILL).astype(np.uint8),
        experts=experts,
    )


def _read_activations(path: Path, sizes: KnownSizes) -> EngineLog:
    """Read ``layer,expert``, one row an activation: tokens are told by the runs of a layer.

    All activations of a layer in a pass stand together, a multiple of k; decode passes have k.
    """
    columns = _columns(path, header=True)
    layer, expert = columns["layer"], columns["expert"]
    _check_layers(layer, path)
    if not len(layer):
        raise CrispError(f"{path}: holds no routing")
    starts = np.flatnonzero(np.diff(layer, prepend=-1))
    lengths = np.diff(starts, append=len(layer))
    k = sizes.top_k or int(np.gcd.reduce(lengths))
    if (lengths % k).any():
        at = int((lengths % k != 0).argmax())
        raise CrispError(
            f"{path}: {lengths[at]} activations of layer {layer[starts[at]]} in a pass, no "
            f"multiple of top-{k}"
        )
    experts = expert.reshape(-1, k)
    tokens = lengths // k
    run = np.repeat(np.arange(len(starts)), tokens)
    row = np.arange(len(experts)) - (np.cumsum(tokens) - tokens)[run]
    layers = layer[starts][run]
    if k > 1 and sizes.top_k is None and len(np.unique(lengths)) == 1 and _repeats(experts):
        raise CrispError(
            f"{path}: all passes have {k} activations a layer, with experts twice: how many a "
            "token has does not follow; --top-k does say"
        )
    number = number_passes(layer[starts])[run]
    records, notes = place_passes(number, layers, row, experts, None)
    rows = records.rows(str(path), sizes.n_layers)
    _refuse_strided(rows, str(path), sizes.n_experts)
    return assemble(rows, "llama.cpp", path, sizes, notes)


def _repeats(experts: Ints) -> bool:
    ids = np.sort(experts, axis=1)
    return bool((ids[:, 1:] == ids[:, :-1]).any())


def _refuse_strided(rows: LoggedRows, name: str, n_experts: int | None) -> None:
    """Raise CrispError where a strided view of the top-k was read as if it were contiguous.

    Such a reader takes the first tokens' whole rankings for the prompt's rows: no expert occurs
    twice within the first experts / k rows of a layer. It is refused where routing like that is
    less likely than one in a million, were it drawn evenly, over all layers together.
    """
    experts = rows.experts
    k = experts.shape[2]
    total = n_experts or int(experts.max()) + 1
    window = total // k
    chance = 0.0
    prompt = rows.phase == PREFILL
    for sequence in np.unique(rows.sequence[prompt]):
        chosen = prompt & (rows.sequence == sequence)
        for layer in range(experts.shape[1]):
            some = experts[chosen, layer]
            ids = some[(some >= 0).all(axis=1)][:window]
            if len(ids) < 2:
                continue
            if len(np.unique(ids)) < ids.size:
                return
            chance += sum(
                _log_choices(total - row * k, k) - _log_choices(total, k)
                for row in range(1, len(ids))
            )
    if chance < _UNLIKELY:
        raise CrispError(
            f"{name}: no expert occurs twice in the first {window} rows of prompts: the strided "
            "top-k view was read as contiguous, so ids of prompts are wrong; log with a reader "
            "that is aware of strides"
        )


def _log_choices(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(n - k + 1) if n >= k else -math.inf


def _check_layers(layer: Ints, path: Path) -> None:
    if len(layer) and (layer.min() < 0 or layer.max() > np.iinfo(np.int16).max):
        odd = layer.min() if layer.min() < 0 else layer.max()
        raise CrispError(f"{path}: layer {odd} found; expected 0 or more")


def _columns(path: Path, *, header: bool, texts: Sequence[str] = ()) -> dict[str, Any]:
    """Return the columns of a CSV of whole numbers, by name or number; CrispError for others."""
    with path.open("rb") as file:
        first = file.readline()
        while not header and first.startswith(b"#"):
            first = file.readline()
        names = first.decode(errors="replace").strip().split(",")
        names = names if header else [str(n) for n in range(len(names))]
        if not header:
            file.seek(-len(first), 1)
        try:
            table = pa.csv.read_csv(
                file,
                read_options=pa.csv.ReadOptions(column_names=names),
                convert_options=pa.csv.ConvertOptions(
                    column_types={n: pa.string() if n in texts else pa.int64() for n in names},
                    null_values=[""],
                ),
            )
        except (pa.ArrowException, OSError) as error:
            what = reason_of(error)
            what = "holds no routing" if what == "Empty CSV file" else what
            raise CrispError(f"{path}: {what}") from error
    columns = {}
    for name in names:
        column = table.column(name)
        if column.null_count:
            raise CrispError(f"{path}: column {name} has an empty cell; the file may be cut off")
        columns[name] = column.to_numpy()
    return columns


def _read_imatrix(path: Path) -> ExpertCounts:
    """Read how often an importance matrix saw each expert: ``<tensor>.counts``, [1, experts]."""
    counts: dict[int, Floats] = {}
    for name, tensor in read_header(path).tensors.items():
        match = _COUNTS.fullmatch(name)
        if match is None or int(match[1]) in counts:  # gate, up and down count the same tokens
            continue
        number = math.prod(tensor.shape)
        if tensor.kind != "F32" or number > MOST_EXPERTS:
            raise CrispError(
                f"{tensor.where} is {tensor.kind} {list(tensor.shape)}; expected counts in F32"
            )
        values = np.fromfile(tensor.path, "<f4", number, offset=tensor.offset)
        counts[int(match[1])] = values.astype(np.float64)
    if not counts:
        raise CrispError(f"{path}: has no counts of experts; is it an imatrix of a MoE model?")
    _check_layers(np.array(list(counts)), path)
    if len({len(one) for one in counts.values()}) > 1:
        raise CrispError(f"{path}: layers have different numbers of experts")
    n_experts = len(next(iter(counts.values())))
    matrix = np.zeros((max(counts) + 1, n_experts))
    for layer, one in counts.items():
        matrix[layer] = one
    return count_experts("llama.cpp", matrix, str(path))
