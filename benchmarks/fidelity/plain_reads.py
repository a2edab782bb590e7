"""Plain O_DIRECT reads of a store, to lay beside the loads of a run."""

from __future__ import annotations

import os
import random
import time

from crisp.hw.memory import map_anonymous
from crisp.hw.store.reader import Store
from crisp.model.spec import PAGE
from crisp.run.timeline import EXPERT, FIRST, KIND, LAYER_ID, LOAD, Rows

_POOL = 256_000_000  # bytes of memory that is read into


def reread(store: Store, rows: Rows) -> int:
    """Read what a run has loaded again, one block after the other; return the time in ns.

    rows: the run's timeline. Blocks go into a pool of memory by turns.
    """
    size, turn = store.spec.block_bytes, 0
    slots = _POOL // size
    buffer = memoryview(map_anonymous(slots * size, "a buffer"))  # as the device's pool
    buffer[:] = bytes(slots * size)  # touched, so that every page is there
    files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in store.files]
    place = {layer: row for row, layer in enumerate(store.spec.moe_layers)}
    begin = time.perf_counter_ns()
    for row in rows[rows[:, KIND] == LOAD]:
        layer, expert, first = int(row[LAYER_ID]), int(row[EXPERT]), int(row[FIRST])
        offset, done, start = store.offset(place[layer], expert, first), 0, turn * size
        turn = (turn + 1) % slots
        while done < size:
            into = buffer[start + done : start + size]
            done += os.preadv(files[place[layer]], [into], offset + done)
    took = time.perf_counter_ns() - begin
    for file in files:
        os.close(file)
    return took


def probe(store: Store, blocks: int) -> float:
    """Read so many blocks at once at random places; return the speed in GB/s."""
    size, path = blocks * store.spec.block_bytes, store.files[0]
    buffer, draw = memoryview(map_anonymous(size, "a buffer")), random.Random(0)
    buffer[:] = bytes(size)
    file, spans = os.open(path, os.O_RDONLY | os.O_DIRECT), (path.stat().st_size - PAGE) // size
    places = [PAGE + size * draw.randrange(spans) for _ in range(max(4, 128_000_000 // size))]
    begin = time.perf_counter()
    for place in places:
        done = 0
        while done < size:
            done += os.preadv(file, [buffer[done:]], place + done)
    took = time.perf_counter() - begin
    os.close(file)
    return len(places) * size / took / 1e9
