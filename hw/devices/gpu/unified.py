"""The unified device: a GPU that shares its memory with the processor, such as a Jetson's.

There is one copy of the weights and no mirror of it. They may be copied within the memory into a
pool of the budget's size (``memory``), used where they are (``mapped``: nothing is loaded, and the
budget only decides what counts as a hit), or be read from the disk into the pool (``disk``). Which
of the first two is taken is measured when the device opens, unless a way is asked for; the disk is
for weights that there is no memory for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from crisp.errors import CrispError
from crisp.hw.devices.batch import Work
from crisp.hw.devices.gpu.arena import Arena, filled
from crisp.hw.devices.gpu.cuda import HEADROOM, device_pool
from crisp.hw.devices.gpu.device import GpuDevice
from crisp.hw.devices.gpu.sources import FromArena, Mapped, Source, Straight
from crisp.hw.devices.gpu.streams import Streams
from crisp.hw.devices.protocol import WAYS, Copy, Done, Piece
from crisp.hw.memory import available
from crisp.hw.store.block_io import Files
from crisp.hw.store.reader import TYPES, Store
from crisp.units import show_bytes

_TRIALS = 5  # of which the median counts


def unified(
    streams: Streams,
    store: Store,
    slots: int,
    *,
    way: str | None = None,
    progress: Callable[[float], None] | None = None,
) -> GpuDevice:
    """A device with a pool of so many slots; see `crisp.hw.devices.protocol.Device`.

    way: one of WAYS; None: what is fastest here, of those there is memory for. progress: told the
    share of the weights that has been read.

    Raises CrispError if memory is too little, and for a way that does not go here.
    """
    weights, pool = store.spec.routed_bytes, slots * store.spec.block_bytes
    needs = {"memory": weights + pool, "mapped": weights, "disk": pool}
    asked = WAYS if way is None else (way,)
    free = available()
    room = None if free is None else max(0, free - HEADROOM)
    ways = [own for own in asked if room is None or needs[own] <= room]
    if room is not None and not ways:
        least = min(needs[own] for own in asked)
        raise CrispError(
            f"{show_bytes(least)} of memory are needed, {show_bytes(room)} can be had, for "
            f"{show_bytes(HEADROOM)} are left to the system"
        )
    device = GpuDevice("unified", streams, store)
    try:
        if ways == ["disk"]:
            _from_disk(device, streams, store, slots)
        else:
            ways = [own for own in ways if own != "disk"]
            _in_memory(device, streams, store, slots, ways, progress)
    except BaseException:
        device.close()
        raise
    return device


def _from_disk(device: GpuDevice, streams: Streams, store: Store, slots: int) -> None:
    pool = Arena(streams, store.spec.block_bytes, slots, slots * store.spec.block_bytes)
    device.resources.callback(pool.close)
    if pool.pageable is not None:
        raise CrispError(f"disk: the GPU cannot reach host memory: {pool.pageable}")
    files = Files(store)
    device.resources.callback(files.close)
    source, how = Straight(files, pool.chunks[0]), {"loads_from": "disk", "direct": files.direct}
    device.load_from(source, pool.chunks[0], how, files)


def _in_memory(
    device: GpuDevice,
    streams: Streams,
    store: Store,
    slots: int,
    ways: list[str],
    progress: Callable[[float], None] | None,
) -> None:
    """Read the weights, then use the fastest of these ways; the others are let go."""
    arena = filled(streams, store, store.spec.routed_bytes, progress)
    device.resources.callback(arena.close)
    if arena.pageable is not None:
        if "memory" not in ways:
            raise CrispError(f"mapped: the GPU cannot reach host memory: {arena.pageable}")
        ways = ["memory"]
    made: dict[str, tuple[Source, Any]] = {}
    if "memory" in ways:
        pool = device_pool(streams, store, slots)
        made["memory"] = FromArena(streams, store, arena, pool), pool
    if "mapped" in ways:
        made["mapped"] = Mapped(store, slots), arena.chunks[0]
    figures, chosen = dict[str, int](), ways[0]
    if len(made) > 1:
        for own, (source, rows) in made.items():
            device.load_from(source, rows, {})
            load, compute = _times(device, streams, store)
            figures |= {f"{own}_load_ns": load, f"{own}_compute_ns": compute}
        chosen = fastest(figures)
    source, rows = made[chosen]
    how = {"loads_from": chosen, "pageable": arena.pageable, **figures}
    device.load_from(source, rows, how)


def fastest(figures: dict[str, int]) -> str:
    """``mapped`` if an expert is computed from where it is sooner than it is copied and computed
    from the pool, every other use taken to be a hit, which needs no copy; else ``memory``.
    """
    copied = figures["memory_load_ns"] // 2 + figures["memory_compute_ns"]
    return "mapped" if figures["mapped_compute_ns"] <= copied else "memory"


def _times(device: GpuDevice, streams: Streams, store: Store) -> tuple[int, int]:
    """What loading an expert takes, and computing it for one row: ns, medians."""
    spec, loads, pieces = store.spec, list[int](), list[int]()
    slots, one = range(spec.n_blocks), np.zeros(1, np.int64)
    row = streams.empty(1, spec.d_model, dtype=TYPES[store.dtype])
    streams.launch(row.zero_)
    hidden = device.place(row)
    for expert in range(min(_TRIALS, spec.n_experts)):
        loads.append(_timed(device, partial(device.copy, Copy(0, expert, 0, slots))))
        work = Work(expert, one, one + spec.n_blocks, np.ones(1, np.float32), hidden)
        piece = Piece(work, 0, slots)
        for _ in range(2):  # the first of all compiles the kernels
            took = _timed(device, partial(device.compute, piece))
        pieces.append(took)
    return int(median(loads)), int(median(pieces))


def _timed(device: GpuDevice, begin: Callable[[Done], None]) -> int:
    ends, over = list[Any](), threading.Event()

    def done(end: int, failure: BaseException | None) -> None:
        ends.extend((end, failure))
        over.set()

    start = device.clock()
    begin(done)
    while not over.wait(1):
        device.check()
    end, failure = ends
    if failure is not None:
        raise failure
    took: int = end - start
    return took
