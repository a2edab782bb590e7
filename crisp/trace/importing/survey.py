"""The first pass of an import: which tokens a long table has, and where each of them goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.trace.importing.readers import KEYS, Table

Ints = npt.NDArray[np.int64]
Progress = Callable[[float], None]  # told the share of the work that is done

_MERGE = 1 << 21  # tokens collected before they are merged
_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Survey:
    """The tokens of a table."""

    rows: int  # of the table
    keys: Ints  # [tokens], ascending: see `keys`
    found: Ints  # [tokens]: table rows of the token
    layers: npt.NDArray[np.bool_]  # [layers]: which occur
    k: int  # experts of a row, at most


@dataclass(frozen=True)
class Plan:
    """Where the tokens go in the trace."""

    row: Ints  # [tokens of the survey]: row of the trace, -1 where left out
    sequence: npt.NDArray[np.int32]  # [rows]
    position: npt.NDArray[np.int32]  # [rows]
    dropped: int  # tokens left out
    splits: int  # sequences begun anew because tokens were missing


def survey(table: Table, layers: int, progress: Progress) -> Survey:
    """Find the tokens of a table and count their rows; ``layers`` are those of the model.

    Memory grows with the tokens, not with the rows, in whatever order these come.
    """
    seen = np.zeros(layers, np.bool_)
    tokens, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    rows, k, pending = 0, 0, 0
    for batch, share in table.batches([*KEYS, *(table.experts if table.lists else [])]):
        key, layer = keys(table, batch), table.integers(batch, "layer", layers - 1)
        seen[layer] = True
        starts = runs(key)
        tokens.append(key[starts])
        counts.append(np.diff(starts, append=len(key)))
        rows, k, pending = rows + len(key), max(k, table.longest(batch)), pending + len(starts)
        if pending > _MERGE:
            merged = _merge(np.concatenate(tokens), np.concatenate(counts))
            tokens, counts, pending = [merged[0]], [merged[1]], 0
        progress(share)
    if not rows or not k:
        raise CrispError(f"{table.path}: holds no {'experts' if rows else 'rows'}")
    return Survey(rows, *_merge(np.concatenate(tokens), np.concatenate(counts)), seen, k)


def keys(table: Table, batch: Any) -> Ints:
    """One number for (sequence, token): sequence << 32 | token."""
    sequence = table.integers(batch, "sequence", _MAX)
    return sequence << 32 | table.integers(batch, "token", _MAX)


def runs(key: Ints) -> Ints:
    """Where each run of equal keys starts."""
    return np.flatnonzero(np.diff(key, prepend=-1))


def _merge(tokens: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Distinct tokens, ascending, with the sums of their counts."""
    order = np.argsort(tokens, kind="stable")
    tokens, counts = tokens[order], counts[order]
    starts = runs(tokens)
    return tokens[starts], np.add.reduceat(counts, starts) if len(starts) else counts


def plan(table: Table, found: Survey, drop: bool) -> Plan:
    """Give every token its row, sorted by (sequence, position).

    Tokens that lack a layer, and positions missing inside a sequence, are refused unless ``drop``:
    then incomplete tokens are left out, and a sequence that breaks goes on as a new one, numbered
    after the last.
    """
    expected = int(found.layers.sum())
    sequence, position = found.keys >> 32, found.keys & 0xFFFFFFFF
    over, under = found.found > expected, found.found < expected
    if over.any():
        raise CrispError(f"{table.path}: {place(found, int(over.argmax()))} has a layer twice")
    dropped = int(under.sum())
    if dropped and not drop:
        first = int(under.argmax())
        raise CrispError(
            f"{table.path}: {dropped} of {len(found.keys)} tokens lack a layer (the first: "
            f"{place(found, first)} has {found.found[first]} of {expected}); "
            "--drop-incomplete leaves them out"
        )
    kept = np.flatnonzero(~under)
    if not len(kept):
        raise CrispError(f"{table.path}: every token lacks a layer; nothing is left")
    sequence, position = sequence[kept], position[kept]
    fresh = np.diff(sequence, prepend=-1) != 0
    broken = ~fresh & (np.diff(position, prepend=0) != 1)
    if broken.any() and not drop:
        at = int(broken.argmax())
        raise CrispError(
            f"{table.path}: sequence {sequence[at]} goes from token {position[at - 1]} to "
            f"{position[at]}; --drop-incomplete goes on there as a new sequence"
        )
    # The part before a sequence's first break keeps its number; the later ones get new numbers.
    piece = np.cumsum(broken)
    before = np.maximum.accumulate(np.where(fresh, piece, 0))  # breaks in earlier sequences
    ids = np.where(piece > before, sequence.max() + piece, sequence)
    order = np.argsort(ids, kind="stable")
    row = np.full(len(found.keys), -1, np.int64)
    row[kept[order]] = np.arange(len(order))
    sorted_ids, positions = ids[order].astype(np.int32), position[order].astype(np.int32)
    return Plan(row, sorted_ids, positions, dropped, int(broken.sum()))


def place(found: Survey, token: int) -> str:
    """What the user calls the token."""
    key = int(found.keys[token])
    return f"sequence {key >> 32}, token {key & 0xFFFFFFFF}"
