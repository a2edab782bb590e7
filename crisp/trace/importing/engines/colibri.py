"""Logs of colibri: its ROUTE_TRACE stream, and the expert history ``.coli_usage``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from crisp.errors import CrispError, shorten
from crisp.trace.importing.engines.assembly import files
from crisp.trace.importing.engines.assembly.counts import count_experts
from crisp.trace.importing.engines.assembly.passes import (
    number_passes,
    pad_ids,
    pad_weights,
    place_passes,
)
from crisp.trace.importing.engines.assembly.rows import Ints, assemble
from crisp.trace.importing.engines.log import (
    MOST_EXPERTS,
    MOST_LAYERS,
    EngineLog,
    ExpertCounts,
    KnownSizes,
)

_DENSE = b"IKU1"  # then layers and experts, and all counts, as uint32
_LINE = re.compile(r"\d+ \d+ \d+( \d+:[-+.0-9einfa]+)+")


def recognise(path: Path, head: bytes) -> bool:
    """Return whether the file is a stream of routing, or a history with its header."""
    if head.startswith(_DENSE):
        return True
    first = head.split(b"\n", 1)[0].strip().decode(errors="replace")
    usage = re.fullmatch(r"-[12] \d+ \d+", first) or (
        path.name.startswith(".coli_usage") and re.fullmatch(r"\d+ \d+ \d+", first)
    )
    return files.is_text(head) and bool(usage or _LINE.fullmatch(first))


def read(paths: Sequence[Path], sizes: KnownSizes) -> EngineLog | ExpertCounts:
    """Read a stream of routing or an expert history."""
    if len(paths) > 1:
        raise CrispError(f"{paths[1]}: one file of colibri is read at a time")
    (path,) = paths
    with path.open("rb") as file:
        head = file.read(4096)
    if head.startswith(_DENSE):
        return _read_dense(path, sizes)
    first = head.split(b"\n", 1)[0].decode(errors="replace")
    if ":" in first:
        return _read_stream(path, sizes)
    return _read_usage(path, sizes)


def _read_stream(path: Path, sizes: KnownSizes) -> EngineLog:
    """Read ``call row layer id:gate ..``: a line for each row of each layer call, in order."""
    keys: list[tuple[int, int, int]] = []  # call, row, layer
    experts: list[list[int]] = []
    gates: list[list[float]] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if not line.endswith("\n"):
                raise CrispError(f"{path}: line {number} is cut off")
            fields = line.split(" ")
            try:
                call, row, layer = (int(text) for text in fields[:3])
                pairs = [pair.split(":") for pair in fields[3:]]
                experts.append([int(expert) for expert, _ in pairs])
                gates.append([float(gate) for _, gate in pairs])
            except ValueError as error:
                raise CrispError(
                    f"{path}: line {number}: '{shorten(line.strip())}'; expected call, row, "
                    "layer and id:gate .."
                ) from error
            if not (0 <= row < 1 << 20 and 0 <= layer < MOST_LAYERS and 0 <= call < 1 << 62):
                raise CrispError(f"{path}: line {number}: call, row or layer out of range")
            keys.append((call, row, layer))
    if not keys:
        raise CrispError(f"{path}: holds no routing")
    ids, weights, key = pad_ids(experts, str(path)), pad_weights(gates), np.array(keys, np.int64)
    notes = []
    if sizes.n_layers is not None and (extra := key[:, 2] >= sizes.n_layers).any():
        notes.append(
            f"layer {sizes.n_layers} and beyond (multi-token prediction): "
            f"{int(extra.sum()):,} lines left out"
        )
        ids, weights, key = ids[~extra], weights[~extra], key[~extra]
        if not len(key):
            raise CrispError(f"{path}: has no layer below {sizes.n_layers}")
    calls, rows, layers = key.T
    records, said = place_passes(number_passes(layers, calls), layers, rows, ids, weights)
    return assemble(
        records.rows(str(path), sizes.n_layers), "colibri", path, sizes, [*notes, *said]
    )


def _read_usage(path: Path, sizes: KnownSizes) -> ExpertCounts:
    """Read ``layer expert count`` lines; negative layers are headers (sizes, version)."""
    found: dict[tuple[int, int], int] = {}
    n_layers, n_experts = sizes.n_layers, sizes.n_experts
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                layer, expert, count = (int(text) for text in line.split())
            except ValueError as error:
                raise CrispError(
                    f"{path}: line {number}: '{shorten(line.strip())}'; expected layer, expert "
                    "and count"
                ) from error
            if layer == -1:
                _check_sizes(path, expert, count)
                # A row more than the layers is for multi-token prediction, where there is one.
                n_layers, n_experts = n_layers or expert, count
            if layer < 0:
                continue
            if not (layer < MOST_LAYERS and 0 <= expert < MOST_EXPERTS and 0 <= count < 1 << 53):
                raise CrispError(f"{path}: line {number}: a number is out of range")
            found[layer, expert] = found.get((layer, expert), 0) + count
    if not found:
        raise CrispError(f"{path}: counts nothing")
    layers, experts = (np.array(numbers, np.int64) for numbers in zip(*found, strict=True))
    n_experts = n_experts or int(experts.max()) + 1
    if experts.max() >= n_experts:
        raise CrispError(f"{path}: expert {experts.max()} found; expected 0 to {n_experts - 1}")
    counts = np.zeros((max(int(layers.max()) + 1, n_layers or 0), n_experts), np.int64)
    counts[layers, experts] = list(found.values())
    return _counts(path, counts, n_layers)


def _read_dense(path: Path, sizes: KnownSizes) -> ExpertCounts:
    data = path.read_bytes()
    if len(data) < 12:
        raise CrispError(f"{path}: is cut off")
    n_layers, n_experts = (int(n) for n in np.frombuffer(data[4:12], "<u4"))
    _check_sizes(path, n_layers, n_experts)
    if len(data) != 12 + 4 * n_layers * n_experts:
        raise CrispError(
            f"{path}: {n_layers} layers of {n_experts} experts need "
            f"{12 + 4 * n_layers * n_experts:,} bytes, {len(data):,} are there"
        )
    counts = np.frombuffer(data[12:], "<u4").reshape(n_layers, n_experts).astype(np.int64)
    return _counts(path, counts, sizes.n_layers)


def _counts(path: Path, counts: Ints, n_layers: int | None) -> ExpertCounts:
    notes = []
    if n_layers is not None and counts[n_layers:].any():
        notes.append(f"layer {n_layers} and beyond (multi-token prediction): left out")
    return count_experts("colibri", counts[:n_layers], str(path), notes)


def _check_sizes(path: Path, n_layers: int, n_experts: int) -> None:
    if not (0 < n_layers < MOST_LAYERS and 0 < n_experts <= MOST_EXPERTS):
        raise CrispError(f"{path}: says {n_layers:,} layers of {n_experts:,} experts; impossible")
