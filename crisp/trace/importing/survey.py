"""The first pass of an import: the tokens of a long table, and the trace row of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.trace.importing.readers import KEYS, LongTable

Ints = npt.NDArray[np.int64]
Progress = Callable[[float], None]  # takes the share of the work that is done

_MERGE = 1 << 21  # tokens collected before they are merged
_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Survey:
    """The tokens of a long table."""

    rows: int  # of the table
    keys: Ints  # [tokens], ascending: see `token_keys`
    row_counts: Ints  # [tokens]: table rows of the token
    layers: npt.NDArray[np.bool_]  # [layers]: which occur
    k: int  # experts of a row, at most


@dataclass(frozen=True)
class RowPlan:
    """The trace row of each token."""

    row: Ints  # [tokens of the survey]: row of the trace, -1 where left out
    sequence: npt.NDArray[np.int32]  # [rows]
    position: npt.NDArray[np.int32]  # [rows]
    dropped: int  # tokens left out
    splits: int  # sequences begun anew because tokens were missing


def survey(table: LongTable, layers: int, progress: Progress) -> Survey:
    """Find the tokens of a table and count their rows; ``layers`` are those of the model.

    Memory grows with the tokens, not with the rows, in whatever order these come.
    """
    layers_seen = np.zeros(layers, np.bool_)
    tokens, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    rows, k, pending = 0, 0, 0
    for batch, share in table.batches([*KEYS, *(table.experts if table.lists else [])]):
        key, layer = token_keys(table, batch), table.integers(batch, "layer", layers - 1)
        layers_seen[layer] = True
        starts = run_starts(key)
        tokens.append(key[starts])
        counts.append(np.diff(starts, append=len(key)))
        rows, k, pending = rows + len(key), max(k, table.longest(batch)), pending + len(starts)
        if pending > _MERGE:
            merged = _merge(np.concatenate(tokens), np.concatenate(counts))
            tokens, counts, pending = [merged[0]], [merged[1]], 0
        progress(share)
    if not rows or not k:
        raise CrispError(f"{table.path}: holds no {'experts' if rows else 'rows'}")
    return Survey(rows, *_merge(np.concatenate(tokens), np.concatenate(counts)), layers_seen, k)


def token_keys(table: LongTable, batch: Any) -> Ints:
    """Return one number for each (sequence, token): sequence << 32 | token, [n]."""
    sequence = table.integers(batch, "sequence", _MAX)
    return sequence << 32 | table.integers(batch, "token", _MAX)


def run_starts(key: Ints) -> Ints:
    """Return the index at which each run of equal keys starts."""
    return np.flatnonzero(np.diff(key, prepend=-1))


def _merge(tokens: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return the distinct tokens, ascending, with the sums of their counts."""
    order = np.argsort(tokens, kind="stable")
    tokens, counts = tokens[order], counts[order]
    starts = run_starts(tokens)
    return tokens[starts], np.add.reduceat(counts, starts) if len(starts) else counts


def plan_rows(table: LongTable, tokens: Survey, drop: bool) -> RowPlan:
    """Give every token its trace row, sorted by (sequence, position).

    Tokens that lack a layer, and positions missing inside a sequence, are refused unless ``drop``:
    then incomplete tokens are left out, and a sequence that breaks goes on as a new one, numbered
    after the last.
    """
    expected = int(tokens.layers.sum())
    sequence, position = tokens.keys >> 32, tokens.keys & 0xFFFFFFFF
    over, under = tokens.row_counts > expected, tokens.row_counts < expected
    if over.any():
        raise CrispError(
            f"{table.path}: {describe_token(tokens, int(over.argmax()))} has a layer twice"
        )
    dropped = int(under.sum())
    if dropped and not drop:
        first = int(under.argmax())
        raise CrispError(
            f"{table.path}: {dropped} of {len(tokens.keys)} tokens lack a layer (the first: "
            f"{describe_token(tokens, first)} has {tokens.row_counts[first]} of {expected}); "
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
    row = np.full(len(tokens.keys), -1, np.int64)
    row[kept[order]] = np.arange(len(order))
    sorted_ids, positions = ids[order].astype(np.int32), position[order].astype(np.int32)
    return RowPlan(row, sorted_ids, positions, dropped, int(broken.sum()))


def describe_token(tokens: Survey, token: int) -> str:
    """Name the token as the user does."""
    key = int(tokens.keys[token])
    return f"sequence {key >> 32}, token {key & 0xFFFFFFFF}"
