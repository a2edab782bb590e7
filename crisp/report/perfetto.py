"""Timelines in Perfetto's trace format: a track for each stream, counters for memory and power.

The file is Chrome's JSON trace format; ui.perfetto.dev and chrome://tracing open it. Rows are
written as they come, so memory does not grow with the length of a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from crisp.files import atomic
from crisp.hardware.profile import Power
from crisp.run.timeline import (
    BLOCKS,
    END,
    EVENT,
    EXPERT,
    FIRST,
    KIND,
    KINDS,
    LAYER,
    LAYER_ID,
    LOAD,
    PREFETCH,
    RESIDENT,
    START,
    STEP,
    Rows,
)

LINK_TRACK, COMPUTE_TRACK = 1, 2
_NAMES = {LINK_TRACK: "link", COMPUTE_TRACK: "compute"}


class PerfettoSink:
    """A sink that turns rows into trace events of one process; `close` ends what it writes."""

    def __init__(
        self,
        write: Callable[[str], object],
        title: str,
        block_bytes: int,
        power: Power | None,
        process: int = 1,
    ) -> None:
        """Write the process' names.

        title: of the timeline; block_bytes: of one block; power: None leaves out its counter.
        """
        self._write = write
        self._process = process
        self._block_bytes = block_bytes
        self._power = None if power is None else PowerCounter(power)
        self._resident = -1
        names = [_meta("process_name", process, 0, {"name": title})]
        for track, name in _NAMES.items():
            names.append(_meta("thread_name", process, track, {"name": name}))
            names.append(_meta("thread_sort_index", process, track, {"sort_index": track}))
        write(",\n".join(json.dumps(name) for name in names))

    def write(self, rows: Rows) -> None:
        """Write the next rows."""
        lines, process = [], self._process
        for row in rows.tolist():
            kind = row[KIND]
            track = LINK_TRACK if kind in (LOAD, PREFETCH) else COMPUTE_TRACK
            lines.append(
                f'{{"ph":"B","pid":{process},"tid":{track},"ts":{format_time(row[START])},'
                f'"cat":"{KINDS[kind]}","name":"{_name(row)}",'
                f'"args":{{"step":{row[STEP]},"event":{row[EVENT]}}}}}'
            )
            lines.append(f'{{"ph":"E","pid":{process},"tid":{track},"ts":{format_time(row[END])}}}')
            if row[RESIDENT] != self._resident:
                self._resident = row[RESIDENT]
                n_bytes = self._resident * self._block_bytes
                lines.append(format_counter("resident bytes", row[END], n_bytes, process))
        if self._power is not None:
            lines += self._power.add(rows)
        self._put(lines)

    def close(self) -> None:
        """Write what was held back."""
        if self._power is not None:
            self._put(self._power.rest())

    def _put(self, lines: list[str]) -> None:
        if lines:
            self._write(",\n" + ",\n".join(lines))


class PowerCounter:
    """A counter of the power drawn, by which streams are busy.

    The state of a stream is known only up to the last end of one of its intervals, so changes after
    that are held back. A block of rows in which the link has none means that the link was idle.
    """

    def __init__(self, power: Power) -> None:
        self._watts = (power.idle, power.link, power.compute, power.both)
        self._pending: Rows = np.empty((0, 2), np.int64)  # (time in ns, change of the state)
        self._state = 0  # bit 0: link is busy, bit 1: compute is
        self._shown = -1

    def add(self, rows: Rows) -> list[str]:
        """Return the counter's events that follow from the next rows."""
        if not len(rows):
            return []
        on_link = (rows[:, KIND] == LOAD) | (rows[:, KIND] == PREFETCH)
        bit = np.where(on_link, 1, 2)
        begins = np.stack([rows[:, START], bit], axis=1)
        ends = np.stack([rows[:, END], -bit], axis=1)
        self._pending = np.concatenate([self._pending, begins, ends])
        limit = int(rows[-1, END])
        for stream in (on_link, ~on_link):
            if stream.any():
                limit = min(limit, int(rows[stream, END].max()))
        return self._events_before(limit)

    def rest(self) -> list[str]:
        """Return the events that were held back."""
        return self._events_before(int(self._pending[:, 0].max()) + 1) if len(self._pending) else []

    def _events_before(self, limit: int) -> list[str]:
        """Return the events before ``limit`` in ns; one for all changes of an instant."""
        times = self._pending[:, 0]
        order = np.argsort(times[times < limit], kind="stable")
        ripe = self._pending[times < limit][order]
        self._pending = self._pending[times >= limit]
        lines = []
        states = self._state + np.cumsum(ripe[:, 1])
        last = np.append(ripe[1:, 0] != ripe[:-1, 0], True)[: len(ripe)]
        for time, state in zip(ripe[last, 0].tolist(), states[last].tolist(), strict=True):
            self._state = state
            if state != self._shown:
                self._shown = state
                lines.append(format_counter("power (W)", time, self._watts[state]))
        return lines


@contextmanager
def perfetto(
    target: Path | IO[str], title: str, block_bytes: int, power: Power | None
) -> Iterator[PerfettoSink]:
    """Yield a sink that streams into a file, which appears when the block ends, or a stream."""
    with _opened(target) as write:
        sink = PerfettoSink(write, title, block_bytes, power)
        yield sink
        sink.close()


@contextmanager
def side_by_side(
    target: Path | IO[str], titles: Sequence[str], block_bytes: int
) -> Iterator[list[PerfettoSink]]:
    """Yield sinks of several timelines in one file, each a process of its own; without power."""
    with _opened(target) as write:
        sinks: list[PerfettoSink] = []
        for process, title in enumerate(titles, 1):
            write(",\n" if sinks else "")
            sinks.append(PerfettoSink(write, title, block_bytes, None, process))
        yield sinks
        for sink in sinks:
            sink.close()


@contextmanager
def _opened(target: Path | IO[str]) -> Iterator[Callable[[str], object]]:
    """Yield a writer of events; what surrounds them is written around the block."""
    with ExitStack() as stack:
        file = target
        if isinstance(file, Path):
            temporary = stack.enter_context(atomic(file))
            file = stack.enter_context(temporary.open("w", encoding="utf-8"))
        write = file.write
        write('{"displayTimeUnit":"ns","traceEvents":[\n')
        yield write
        write("\n]}\n")


def format_time(ns: int) -> str:
    """Return a time in µs, as the format wants it.

    A tenth of a ns is added to all: Perfetto multiplies by 1000 in floating point and cuts off, so
    without it some times would be 1 ns early.

    >>> format_time(1234567)
    '1234.5671'
    """
    return f"{ns // 1000}.{ns % 1000:03d}1"


def format_counter(name: str, ns: int, value: float, process: int = 1) -> str:
    """Return one value of a counter, as an event."""
    head = f'{{"ph":"C","pid":{process},"name":"{name}","ts":{format_time(ns)}'
    return f'{head},"args":{{"value":{value!r}}}}}'


def _meta(name: str, process: int, track: int, args: dict[str, object]) -> dict[str, object]:
    """Return an event that names a process or a track."""
    return {"name": name, "ph": "M", "pid": process, "tid": track, "args": args}


def _name(row: list[int]) -> str:
    """Return the name of a row's interval."""
    kind, first = row[KIND], row[FIRST]
    if kind == LAYER:
        return f"layer L{row[LAYER_ID]}"
    blocks = f"[{first},{first + row[BLOCKS]})"
    return f"{KINDS[kind]} L{row[LAYER_ID]} E{row[EXPERT]} {blocks}"
