"""Logs of moe-cache-eval: events.safetensors with its manifest.json, and its CSV of events."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from crisp.errors import CrispError, reason_of, shorten
from crisp.trace import DECODE
from crisp.trace.importing.engines.assembly import files
from crisp.trace.importing.engines.assembly.passes import pad_ids
from crisp.trace.importing.engines.assembly.rows import Ints, LayerRecords, assemble
from crisp.trace.importing.engines.log import MOST_LAYERS, EngineLog, KnownSizes

_MANIFEST, _EVENTS = "manifest.json", "events.safetensors"
BELONG = {_MANIFEST: (_EVENTS,), _EVENTS: (_MANIFEST,), "events.csv": (_MANIFEST,)}
"""Files that are read with one of a certain name, if they lie beside it."""
_EVENT = ("request_indices", "scheduler_steps", "forward_cycles", "phases", "layer_ids")
_ACCESS = ("expert_ids", "assignment_counts", "gate_mass")
_CSV = b"event_index,scheduler_step,layer,requested_experts"
_MOST_TOKENS = 1 << 24  # of all events together


def recognise(path: Path, head: bytes) -> bool:
    """Return whether the file is a file of events, by its tensors' names, or its CSV."""
    if head.startswith(_CSV):
        return True
    if path.name == _MANIFEST:
        return (path.parent / _EVENTS).is_file()
    names = [f'"{name}"'.encode() for name in (*_EVENT, *_ACCESS, "offsets")]
    return all(name in head for name in names)


def read(paths: Sequence[Path], sizes: KnownSizes) -> EngineLog:
    """Read events.safetensors or its manifest.json (the other lies beside it), or events.csv."""
    if len(paths) > 1:
        raise CrispError(f"{paths[1]}: one file of moe-cache-eval is read at a time")
    (path,) = paths
    with path.open("rb") as file:
        if file.read(len(_CSV)) == _CSV:
            return _read_csv(path, sizes)
    folder = path.parent
    manifest = files.read_json(folder / _MANIFEST) if (folder / _MANIFEST).is_file() else {}
    events = folder / _EVENTS if path.name == _MANIFEST else path
    if not events.is_file():
        raise CrispError(f"{events}: no such file; {path.name} belongs to it")
    sizes = _manifest_sizes(manifest, events, sizes)
    tensors = _load(events)
    return _events(tensors, events, sizes)


def _manifest_sizes(manifest: Any, events: Path, sizes: KnownSizes) -> KnownSizes:
    """Return the sizes, with those of the manifest; CrispError if the events are not its own."""
    if not isinstance(manifest, dict):
        raise CrispError(f"{events.parent / _MANIFEST}: not a JSON object")
    artifact: Any = manifest
    for key in ("artifacts", "events", "sha256"):
        artifact = artifact.get(key) if isinstance(artifact, dict) else None
    if isinstance(artifact, str):
        digest = hashlib.sha256(events.read_bytes()).hexdigest()
        if digest != artifact:
            raise CrispError(f"{events}: is not the file that {_MANIFEST} beside it is of (sha256)")
    model = manifest.get("model")
    if isinstance(model, dict):
        experts = model.get("num_experts", model.get("num_experts_per_layer"))
        layers = model.get("num_layers")
        if isinstance(experts, int) and isinstance(layers, int) and 0 < layers < MOST_LAYERS:
            return sizes._replace(
                n_experts=sizes.n_experts or experts, n_layers=sizes.n_layers or layers
            )
    return sizes


def _load(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with safe_open(path, framework="numpy") as file:
            names = set(file.keys())
            wanted = {*_EVENT, *_ACCESS, "token_counts", "offsets"}
            if missing := sorted(wanted - names):
                raise CrispError(f"{path}: lacks the tensor '{missing[0]}'")
            tensors = {name: file.get_tensor(name) for name in wanted}
    except (SafetensorError, OSError, TypeError) as error:
        what = reason_of(error)
        raise CrispError(f"{path}: not a whole safetensors file ({what})") from error
    for name, array in tensors.items():
        kinds = "f" if name == "gate_mass" else "iu"
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise CrispError(f"{path}: {name} is {array.dtype} {list(array.shape)}")
    return tensors


def _events(tensors: Mapping[str, NDArray[Any]], path: Path, sizes: KnownSizes) -> EngineLog:
    """Return the log of events, each the distinct experts of a request's tokens in a layer.

    The experts of a decode token are exact. Of an event of several tokens only the counts of each
    expert are known: they are dealt to its rows so that the event's experts and counts are right,
    each row has as many, and none twice.
    """
    request, step, cycle, phase, layer = (tensors[name].astype(np.int64) for name in _EVENT)
    tokens, offsets = tensors["token_counts"].astype(np.int64), tensors["offsets"].astype(np.int64)
    ids, counts = (tensors[name].astype(np.int64) for name in _ACCESS[:2])
    mass = tensors["gate_mass"].astype(np.float64)
    n = len(layer)
    lengths = {len(column) for column in (request, step, cycle, phase, tokens)}
    if lengths != {n} or len(offsets) != n + 1 or len({len(ids), len(counts), len(mass)}) != 1:
        raise CrispError(f"{path}: its tensors differ in length")
    if not n:
        raise CrispError(f"{path}: holds no events")
    if offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise CrispError(f"{path}: offsets do not rise from 0 to the {len(ids)} accesses")
    if layer.min() < 0 or layer.max() >= MOST_LAYERS or tokens.min() < 1:
        raise CrispError(f"{path}: a layer or a number of tokens is out of range")
    if int(tokens.sum()) > _MOST_TOKENS or phase.min() < 0 or phase.max() > 1:
        raise CrispError(f"{path}: too many tokens, or a phase other than 0 and 1")
    each = np.diff(offsets)
    sums = np.add.reduceat(np.append(counts, 0), offsets[:-1]) * (each > 0)
    most = np.maximum.reduceat(np.append(counts, 0), offsets[:-1]) * (each > 0)
    k = sums // tokens
    bad = (sums != k * tokens) | (most > tokens) | (k < 1) | (counts.min(initial=1) < 1)
    if bad.any():
        at = int(bad.argmax())
        raise CrispError(
            f"{path}: event {at}: {sums[at]} assignments of {tokens[at]} tokens, {most[at]} of "
            "them one expert's; every token has as many experts, none twice"
        )
    # Sequences: a request, its tokens numbered by its passes; a layer with fewer has the last.
    pass_key = np.stack([request, step, cycle], axis=1)
    passes, number = np.unique(pass_key, axis=0, return_inverse=True)
    number = number.reshape(-1)
    size = np.zeros(len(passes), np.int64)
    np.maximum.at(size, number, tokens)
    start = np.cumsum(size) - size
    fresh = np.diff(passes[:, 0], prepend=passes[0, 0] - 1) != 0
    start -= np.repeat(start[fresh], np.diff(np.flatnonzero(fresh), append=len(passes)))
    event = np.repeat(np.arange(n), tokens)  # of each record
    row = np.arange(len(event)) - (np.cumsum(tokens) - tokens)[event]
    # Deal: an expert's tokens are consecutive rows, going round, so that none has it twice.
    dealt = np.repeat(np.arange(len(ids)), counts)  # of each assignment, its access
    of_event = np.repeat(np.arange(n), sums)
    place = np.arange(len(dealt)) - (np.cumsum(sums) - sums)[of_event]
    record = (np.cumsum(tokens) - tokens)[of_event] + place % tokens[of_event]
    experts = np.full((len(event), int(k.max())), -1, np.int64)
    weights = np.zeros(experts.shape)
    rank = place // tokens[of_event]
    experts[record, rank] = ids[dealt]
    weights[record, rank] = (mass / counts)[dealt]
    notes = []
    several = int((tokens > 1).sum())
    if several:
        notes.append(
            f"{several:,} events of several tokens: which token used which expert is not in the "
            "log; their experts and counts are kept, their weights are means"
        )
    records = LayerRecords(
        sequence=request[event],
        position=start[number[event]] + (size[number] - tokens)[event] + row,
        layer=layer[event],
        phase=phase[event].astype(np.uint8),
        experts=experts,
        weights=weights,
    )
    rows = records.rows(str(path), sizes.n_layers)
    return assemble(rows, "moe-cache-eval", path, sizes, notes)


def _read_csv(path: Path, sizes: KnownSizes) -> EngineLog:
    """Read an events.csv: the distinct experts that each step of the scheduler asks a layer for."""
    try:
        table = pa.csv.read_csv(path)
    except (pa.ArrowException, OSError) as error:
        raise CrispError(f"{path}: {reason_of(error)}") from error
    columns: dict[str, Ints] = {}
    for name in ("scheduler_step", "layer"):
        column = table.column(name).to_numpy()
        if column.dtype.kind != "i" or column.min(initial=0) < 0 or column.max(initial=0) > 1 << 30:
            raise CrispError(f"{path}: column {name}: expected whole numbers, none negative")
        columns[name] = column.astype(np.int64)
    lists: list[list[int]] = []
    for number, text in enumerate(table.column("requested_experts").to_pylist(), start=2):
        try:
            lists.append([int(expert) for expert in str(text).split()])
        except ValueError as error:
            raise CrispError(f"{path}: line {number}: experts '{shorten(str(text))}'") from error
    if not lists or columns["layer"].max() >= MOST_LAYERS:
        raise CrispError(f"{path}: holds no events, or a layer out of range")
    manifest = path.parent / _MANIFEST
    if manifest.is_file():
        sizes = _manifest_sizes(files.read_json(manifest), path, sizes)
    records = LayerRecords(
        sequence=np.zeros(len(lists), np.int64),
        position=columns["scheduler_step"],
        layer=columns["layer"],
        phase=np.full(len(lists), DECODE, np.uint8),
        experts=pad_ids(lists, str(path)),
        ordered=False,
    )
    rows = records.rows(str(path), sizes.n_layers)
    notes = ["no tokens in the log: each step of the scheduler is taken as one decode token"]
    return assemble(rows, "moe-cache-eval", path, sizes, notes)
