"""Logs of SGLang: the expert distribution recorder's dumps, and responses with routed experts."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from crisp.errors import CrispError
from crisp.trace.importing.engines.arrays import Prompted, rows_of_arrays
from crisp.trace.importing.engines.assembly import files
from crisp.trace.importing.engines.assembly.batches import Pass, follow_sequences
from crisp.trace.importing.engines.assembly.counts import count_experts
from crisp.trace.importing.engines.assembly.rows import Ints, LoggedRows, assemble
from crisp.trace.importing.engines.log import EngineLog, ExpertCounts, KnownSizes

_KEYS = (b"topk_ids_of_layer", b"logical_count", b"global_physical_count")
_EXTEND, _DECODE, _MIXED, _IDLE = 1, 2, 3, 4  # forward_mode


def recognise(path: Path, head: bytes) -> bool:
    """Return whether the file is a recorder's .pt, or a response whose meta_info has experts."""
    if files.is_text(head):
        return (b'"meta_info"' in head or b'"sglext"' in head) and b'"routed_experts"' in head
    if not head.startswith(files.ZIP):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [m for m in archive.infolist() if m.filename.endswith("data.pkl")]
            if not pickles or pickles[0].file_size > 1 << 28:
                return False
            with archive.open(pickles[0]) as file:
                start = file.read(1 << 16)
            return any(key in start for key in _KEYS)
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError):
        return False


def read(paths: Sequence[Path], sizes: KnownSizes) -> EngineLog | ExpertCounts:
    """Read a recorder's dumps (.pt, one a rank) or responses (.json)."""
    with paths[0].open("rb") as file:
        if files.is_text(file.read(64)):
            return _read_responses(paths, sizes)
    dumps = [(path, files.read_pt(path)) for path in paths]
    # A list of records is what somebody saved of a dump.
    dumps = [(path, {"records": d} if isinstance(d, list) else d) for path, d in dumps]
    for path, dump in dumps:
        if not isinstance(dump, dict) or not ({"records", "logical_count"} & set(dump)):
            raise CrispError(f"{path}: has no 'records' and no 'logical_count'; not a dump")
    if any("logical_count" in dump for _, dump in dumps):
        return _read_counts(dumps)
    return _read_records(dumps, sizes)


def _read_responses(paths: Sequence[Path], sizes: KnownSizes) -> EngineLog:
    sequences: list[Prompted] = []
    for path in paths:
        value = files.read_json(path)
        several = value if isinstance(value, list) else [value]
        for number, response in enumerate(several):
            name = f"{path}: response {number}" if len(several) > 1 else str(path)
            sequences += _routed(response, name, sizes)
    if not sequences:
        raise CrispError(f"{paths[0]}: has no routed experts")
    rows, notes = rows_of_arrays(sequences, str(paths[0]))
    return assemble(rows, "sglang", paths[0], sizes, notes)


def _routed(response: Any, name: str, sizes: KnownSizes) -> list[Prompted]:
    """Return the routing of a response: base64 of int32 [tokens - 1, layers, k], unshaped."""
    if not isinstance(response, dict):
        raise CrispError(f"{name}: not a JSON object")
    choices = response.get("choices")
    holders = [response, *(choices if isinstance(choices, list) else [])]
    usage = response.get("usage")
    found = []
    for holder in holders:
        for key in ("meta_info", "sglext"):
            info = holder.get(key) if isinstance(holder, dict) else None
            text = info.get("routed_experts") if isinstance(info, dict) else None
            if text is None or not isinstance(info, dict):
                continue
            counts = info if "prompt_tokens" in info else usage
            counts = counts if isinstance(counts, dict) else {}
            prompt, new = (counts.get(k) for k in ("prompt_tokens", "completion_tokens"))
            if not isinstance(prompt, int) or not isinstance(new, int) or prompt + new < 2:
                raise CrispError(
                    f"{name}: has no prompt_tokens and completion_tokens; the routing's shape "
                    "follows from them"
                )
            found.append(Prompted(_shaped(text, prompt + new - 1, name, sizes), prompt))
    return found


def _shaped(text: Any, tokens: int, name: str, sizes: KnownSizes) -> Ints:
    if not isinstance(text, str):
        return files.whole_array(text, 3, f"{name}: routed_experts")
    data = files.decode_base64(text, f"{name}: routed_experts")
    if not data or len(data) % (4 * tokens):
        raise CrispError(
            f"{name}: routed_experts are {len(data):,} bytes; expected a multiple of 4 for each of "
            f"the {tokens:,} tokens but the last"
        )
    each = len(data) // (4 * tokens)  # layers x k
    known = sizes.top_k or sizes.n_layers
    if known is None:
        raise CrispError(
            f"{name}: does not say how many layers there are; --model does, or "
            "crisp trace import --layers"
        )
    if each % known:
        what = "experts a token" if sizes.top_k else "layers"
        raise CrispError(
            f"{name}: {each} experts a token, over all layers, are not a multiple of {known} {what}"
        )
    k = sizes.top_k or each // known
    ids = np.frombuffer(data, "<i4").reshape(tokens, each // k, k)
    return files.whole_array(ids, 3, f"{name}: routed_experts")


def _read_counts(dumps: Sequence[tuple[Path, dict[str, Any]]]) -> ExpertCounts:
    path, dump = dumps[0]
    if len(dumps) > 1:
        raise CrispError(f"{dumps[1][0]}: counts are summed over ranks already; one file expected")
    counts = files.whole_array(dump["logical_count"], 3, f"{path}: logical_count")
    return count_experts("sglang", counts.sum(axis=0), str(path))


def _read_records(
    dumps: Sequence[tuple[Path, dict[str, Any]]], sizes: KnownSizes
) -> EngineLog | ExpertCounts:
    """Read records of single passes: token by token, or counts of each."""
    records: list[tuple[str, int, Any, dict[str, Any]]] = []  # name, rank's file, map, record
    for number, (path, dump) in enumerate(dumps):
        mapping = dump.get("last_physical_to_logical_map")
        if mapping is not None:
            mapping = files.whole_array(mapping, 2, f"{path}: last_physical_to_logical_map")
        if not isinstance(dump.get("records"), list):
            raise CrispError(f"{path}: 'records' is no list")
        for index, record in enumerate(dump["records"]):
            name = f"{path}: record {index}"
            if not isinstance(record, dict):
                raise CrispError(f"{name}: no dictionary")
            records.append((name, number, mapping, record))
    if not records:
        raise CrispError(f"{dumps[0][0]}: holds no records")
    if "topk_ids_of_layer" not in records[0][3]:
        return _sum_passes(records, str(dumps[0][0]))

    passes: list[list[Pass]] = [[] for _ in dumps]  # by rank
    seen: set[tuple[Any, ...]] = set()
    same = 0
    for name, rank, mapping, record in records:
        one = _pass(record, mapping, name)
        key = (record.get("forward_pass_id"), one.positions.tobytes(), one.experts.tobytes())
        if record.get("forward_pass_id") is not None and key in seen:
            same += 1  # tensor parallelism: every rank logs all tokens
            continue
        seen.add(key)
        passes[rank].append(one)
    k = max((one.experts.shape[2] for rank in passes for one in rank), default=0)
    rows: list[LoggedRows] = []
    notes: list[str] = []
    first = padded = 0
    for of_rank in filter(None, passes):
        followed, empty, said = follow_sequences(of_rank, k, first)
        padded += empty
        first = int(followed.sequence.max(initial=-1)) + 1
        rows.append(followed)
        notes += [line for line in said if line not in notes]
    if same:
        notes.append(f"{same:,} records of several ranks are the same: each counted once")
    joined = LoggedRows(
        experts=np.concatenate([part.experts for part in rows]),
        sequence=np.concatenate([part.sequence for part in rows]),
        position=np.concatenate([part.position for part in rows]),
        phase=np.concatenate([part.phase for part in rows]),
    )
    if padded:
        notes.append(f"{padded:,} places of decode batches without any expert (padding): left out")
    log = assemble(joined, "sglang", dumps[0][0], sizes, notes)
    return replace(log, left_out=log.left_out + padded)


def _pass(record: dict[str, Any], mapping: Ints | None, name: str) -> Pass:
    """Return the pass that a record is of, its physical experts mapped back to the model's."""
    ids = files.whole_array(record["topk_ids_of_layer"], 3, f"{name}: topk_ids_of_layer")
    positions = files.whole_array(record.get("positions", []), 1, f"{name}: positions")
    layers, tokens, _ = ids.shape
    if ids.size and (ids == 0).all():
        raise CrispError(f"{name}: all ids are 0: nothing was captured")
    if len(positions) != tokens:
        raise CrispError(f"{name}: {len(positions)} positions, routing of {tokens} tokens")
    if mapping is not None:
        if len(mapping) != layers:
            raise CrispError(
                f"{name}: routing of {layers} layers, last_physical_to_logical_map of "
                f"{len(mapping)}"
            )
        if ids.size and ids.max() >= mapping.shape[1]:
            raise CrispError(
                f"{name}: expert {ids.max()} found; last_physical_to_logical_map has "
                f"{mapping.shape[1]} places"
            )
        held = np.take_along_axis(mapping, np.maximum(ids, 0).reshape(layers, -1), axis=1)
        ids = np.where(ids < 0, -1, held.reshape(ids.shape))
    mode = record.get("forward_mode")
    lengths = record.get("extend_seq_lens")
    if mode not in (None, _EXTEND, _DECODE, _MIXED, _IDLE):
        raise CrispError(
            f"{name}: forward_mode {mode} (drafts of speculative decoding, or another pass) does "
            "not say which tokens were kept; record without it"
        )
    pieces = None
    if mode != _DECODE and lengths is not None:
        pieces = files.whole_array(lengths, 1, f"{name}: extend_seq_lens")
        if pieces.min(initial=0) < 0 or int(pieces.sum()) > tokens:
            raise CrispError(f"{name}: extend_seq_lens sum to {pieces.sum()}, of {tokens} tokens")
    return Pass(
        experts=ids.transpose(1, 0, 2),
        positions=positions,
        decode=mode == _DECODE,
        mixed=mode == _MIXED,
        lengths=None if pieces is None else tuple(pieces.tolist()),
    )


def _sum_passes(records: Sequence[tuple[str, int, Any, dict[str, Any]]], path: str) -> ExpertCounts:
    """Return the sum of counts of single passes, of physical experts mapped back."""
    total: Ints | None = None
    for name, _, mapping, record in records:
        value = record.get("global_physical_count")
        if value is None or mapping is None:
            raise CrispError(f"{name}: has neither topk_ids_of_layer nor counts with a map")
        counts = files.whole_array(value, 2, f"{name}: global_physical_count")
        if counts.shape != mapping.shape:
            raise CrispError(
                f"{name}: counts are {list(counts.shape)}, the map {list(mapping.shape)}"
            )
        if mapping.min() < 0 or mapping.max() > np.iinfo(np.int16).max:
            raise CrispError(f"{name}: last_physical_to_logical_map has expert {mapping.max()}")
        logical = np.zeros((len(counts), int(mapping.max()) + 1), np.int64)
        np.add.at(logical, (np.arange(len(counts))[:, None], mapping), counts)
        total = logical if total is None else total + logical
    assert total is not None
    return count_experts("sglang", total, path)
