"""Batches of tokens without request ids: which sequence each token goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from crisp.trace import DECODE, PREFILL
from crisp.trace.importing.engines.assembly.rows import Ints, LoggedRows


@dataclass(frozen=True, eq=False, kw_only=True)
class Pass:
    """One forward pass of a batch."""

    experts: Ints  # [tokens, layers, k]: -1 where absent
    positions: Ints  # [tokens]
    decode: bool  # each token is the next of a sequence of its own
    mixed: bool = False  # a part of one token may be a decode token
    lengths: tuple[int, ...] | None = None  # tokens of each request's part, if not decode


@dataclass
class _Open:
    """A sequence that may go on."""

    number: int
    next: int  # the position that its next token has
    phase: int = PREFILL


@dataclass
class _Rows:
    """The rows found so far, as indices into the passes."""

    source: list[tuple[int, int]] = field(default_factory=list)  # (pass, token)
    sequence: list[int] = field(default_factory=list)
    phase: list[int] = field(default_factory=list)


def follow_sequences(
    passes: Sequence[Pass], k: int, first: int
) -> tuple[LoggedRows, int, list[str]]:
    """Give every token of ``passes`` its sequence, numbered from ``first``.

    Returns the rows, how many places of decode batches held no token, and notes.

    A part of a prompt goes on with the sequence whose next position it begins at, if that has not
    decoded yet (a prompt in chunks), and begins a new one else. A decode token goes on with the
    sequence whose next position it has. Where several have, the order of the batch decides, which
    engines keep from pass to pass.
    """
    running: list[_Open] = []  # in the order of the batch
    rows = _Rows()
    count, unsure, orphans, padded = first, 0, 0, 0

    def begin(position: int) -> _Open:
        nonlocal count
        count += 1
        running.append(_Open(count - 1, position))
        return running[-1]

    for number, one in enumerate(passes):
        positions = one.positions.tolist()
        if one.decode:
            place, taken = 0, set()
            for token, position in enumerate(positions):
                if (one.experts[token] < 0).all():
                    padded += 1
                    continue
                fits = [i for i, s in enumerate(running) if s.next == position and i not in taken]
                later = [i for i in fits if i >= place]
                unsure += len(fits) > 1
                if fits:
                    index = (later or fits)[0]
                else:
                    orphans += 1
                    begin(position)
                    index = len(running) - 1
                taken.add(index)
                place = index + 1
                _take(rows, running[index], number, token, DECODE)
            running = [s for i, s in enumerate(running) if i in taken or s.phase == PREFILL]
            continue
        start = 0
        for length in one.lengths or _runs(positions):
            part = range(start, start + length)
            start += length
            if not length:
                continue
            begins = positions[part[0]]
            opened = next(
                (s for s in running if s.next == begins and (length == 1 or s.phase == PREFILL)),
                None,
            )
            begun = opened is None or begins == 0
            if opened is None or begun:
                opened = begin(begins)
            decoded = opened.phase == DECODE or (one.mixed and length == 1 and not begun)
            phase = DECODE if decoded else PREFILL
            for token in part:
                _take(rows, opened, number, token, phase)
    experts = [_widened(passes[p].experts[token], k) for p, token in rows.source]
    notes = []
    if unsure:
        notes.append(
            f"{unsure:,} decode tokens could go on with several sequences: the batch's order "
            "decided"
        )
    if orphans:
        notes.append(f"{orphans:,} decode tokens go on with nothing that was recorded")
    positions_of = [int(passes[p].positions[token]) for p, token in rows.source]
    layers = passes[0].experts.shape[1] if passes else 0
    return (
        LoggedRows(
            experts=np.stack(experts) if experts else np.empty((0, layers, k), np.int64),
            sequence=np.array(rows.sequence, np.int64),
            position=np.array(positions_of, np.int64),
            phase=np.array(rows.phase, np.uint8),
        ),
        padded,
        notes,
    )


def _take(rows: _Rows, opened: _Open, number: int, token: int, phase: int) -> None:
    rows.source.append((number, token))
    rows.sequence.append(opened.number)
    rows.phase.append(phase)
    opened.next += 1
    opened.phase = phase


def _runs(positions: Sequence[int]) -> list[int]:
    """Return the lengths of the runs in which positions rise by one."""
    lengths: list[int] = []
    for index, position in enumerate(positions):
        if index and position == positions[index - 1] + 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def _widened(experts: Ints, k: int) -> Ints:
    """Return experts [layers, any k] as [layers, k]."""
    missing = k - experts.shape[1]
    return np.pad(experts, ((0, 0), (0, missing)), constant_values=-1) if missing else experts
