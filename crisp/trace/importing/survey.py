"""The first pass of an import: the tokens of a long table, and the trace row of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.trace.importing.readers import KEYS, LongTable
from crisp.trace.importing.sequence_ids import MOST

Ints = npt.NDArray[np.int64]
Progress = Callable[[float], None]  # takes the share of the work that is done

_MERGE = 1 << 21  # tokens collected before they are merged


@dataclass(frozen=True)
class Survey:
    """The tokens of a long table."""

    rows: int  # of the table
    keys: Ints  # [tokens], ascending: see `token_keys`
    row_counts: Ints  # [tokens]: table rows of the token
    filled: Ints  # [tokens]: those of them that have an expert
    layers: npt.NDArray[np.bool_]  # [layers]: which occur
    moe: npt.NDArray[np.bool_]  # [layers]: those in which a row has an expert
    k: int  # experts of a row, at most
    width: int  # places for them: columns, or the longest list


@dataclass(frozen=True)
class RowPlan:
    """The trace row of each token."""

    row: Ints  # [tokens of the survey]: row of the trace, -1 where left out
    sequence: npt.NDArray[np.int32]  # [rows]
    position: npt.NDArray[np.int32]  # [rows]
    dropped: int  # tokens left out as they lack a layer
    padding: int  # tokens left out as they have no expert at all
    splits: int  # sequences begun anew because tokens were missing


def survey(table: LongTable, layers: int, n_experts: int, progress: Progress) -> Survey:
    """Find the tokens of a table and count their rows; the model has so many layers and experts.

    Memory grows with the tokens, not with the rows, in whatever order these come.
    """
    layers_seen, moe = np.zeros(layers, np.bool_), np.zeros(layers, np.bool_)
    parts: list[tuple[Ints, Ints, Ints]] = []  # tokens, their rows, those with an expert
    rows, k, width, pending = 0, 0, 0, 0
    for batch, share in table.batches([*KEYS, *table.experts]):
        key, layer = token_keys(table, batch), table.integers(batch, "layer", layers - 1)
        experts = table.expert_matrix(batch, None, n_experts - 1)
        used = (experts >= 0).sum(axis=1)
        filled = used > 0
        layers_seen[layer] = True
        moe[layer[filled]] = True
        starts = run_starts(key)
        if len(starts):
            parts.append(
                (
                    key[starts],
                    np.diff(starts, append=len(key)),
                    np.add.reduceat(filled.astype(np.int64), starts),
                )
            )
        rows, pending = rows + len(key), pending + len(starts)
        k, width = max(k, int(used.max(initial=0))), max(width, experts.shape[1])
        if pending > _MERGE:
            parts, pending = [_merge(parts)], 0
        progress(share)
    if not rows or not moe.any():
        raise CrispError(f"{table.path}: holds no {'experts' if rows else 'rows'}")
    return Survey(rows, *_merge(parts), layers_seen, moe, k, width)


def token_keys(table: LongTable, batch: Any) -> Ints:
    """Return one number for each (sequence, token): sequence << 32 | token, [n]."""
    return table.sequences(batch) << 32 | table.integers(batch, "token", MOST)


def run_starts(key: Ints) -> Ints:
    """Return the index at which each run of equal keys starts."""
    return np.flatnonzero(np.diff(key, prepend=-1))


def _merge(parts: list[tuple[Ints, Ints, Ints]]) -> tuple[Ints, Ints, Ints]:
    """Return the distinct tokens, ascending, with the sums of their counts."""
    tokens, counts, filled = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(tokens, kind="stable")
    tokens = tokens[order]
    starts = run_starts(tokens)
    return (
        tokens[starts],
        np.add.reduceat(counts[order], starts),
        np.add.reduceat(filled[order], starts),
    )


def plan_rows(table: LongTable, tokens: Survey, drop: bool) -> RowPlan:
    """Give every token its trace row, sorted by (sequence, position).

    Tokens without any expert are padding, and left out. Those that lack a layer, and positions
    missing inside a sequence, are refused unless ``drop``: then incomplete tokens are left out, and
    a sequence that breaks goes on as a new one, numbered after the last.
    """
    expected = int(tokens.layers.sum())
    padding = tokens.filled == 0
    sequence, position = tokens.keys >> 32, tokens.keys & 0xFFFFFFFF
    over = ~padding & (tokens.row_counts > expected)
    under = ~padding & (tokens.row_counts < expected)
    if over.any():
        raise CrispError(
            f"{table.path}: {describe_token(table, tokens, int(over.argmax()))} has a layer twice"
        )
    dropped = int(under.sum())
    if dropped and not drop:
        first = int(under.argmax())
        token = describe_token(table, tokens, first)
        raise CrispError(
            f"{table.path}: {dropped} of {len(tokens.keys)} tokens lack a layer (the first: "
            f"{token} has {tokens.row_counts[first]} of {expected}); "
            "--drop-incomplete leaves them out"
        )
    kept = np.flatnonzero(~(under | padding))
    if not len(kept):
        raise CrispError(f"{table.path}: every token lacks a layer; nothing is left")
    sequence, position = sequence[kept], position[kept]
    fresh = np.diff(sequence, prepend=-1) != 0
    broken = ~fresh & (np.diff(position, prepend=0) != 1)
    if broken.any() and not drop:
        at = int(broken.argmax())
        name = table.sequence_name(int(sequence[at]))
        raise CrispError(
            f"{table.path}: sequence {name} goes from token {position[at - 1]} to "
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
    return RowPlan(row, sorted_ids, positions, dropped, int(padding.sum()), int(broken.sum()))


def describe_token(table: LongTable, tokens: Survey, token: int) -> str:
    """Name the token as the user does."""
    key = int(tokens.keys[token])
    return f"sequence {table.sequence_name(key >> 32)}, token {key & 0xFFFFFFFF}"
