"""The unified device: a GPU that shares its memory with the processor, such as a Jetson's.

Weights are in memory once. They may be copied within the memory into a pool of the budget's size
(``memory``), used where they are (``mapped``: nothing is loaded, and the budget only decides what
counts as a hit), or be read from the disk into the pool (``disk``). Unless one of these ways is
asked for, the faster of the first two is found by measurement when the device opens; the disk is
for weights that do not fit into memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from crisp.errors import CrispError
from crisp.hw.devices.batch import ExpertBatch
from crisp.hw.devices.gpu.arena import Arena, load_arena
from crisp.hw.devices.gpu.cuda import HEADROOM, device_pool
from crisp.hw.devices.gpu.device import GpuDevice
from crisp.hw.devices.gpu.sources import BlockSource, DirectToPool, FromArena, MappedBlocks
from crisp.hw.devices.gpu.streams import DeviceStreams
from crisp.hw.devices.protocol import WAYS, BlockRange, Copy, Done
from crisp.hw.memory import available_bytes
from crisp.hw.store.block_io import StoreFiles
from crisp.hw.store.reader import TORCH_TYPES, Store
from crisp.units import format_bytes

_TRIALS = 5  # experts that are timed; the median counts


def unified(
    streams: DeviceStreams,
    store: Store,
    slots: int,
    *,
    way: str | None = None,
    progress: Callable[[float], None] | None = None,
) -> GpuDevice:
    """Open a GPU with a pool of ``slots`` slots; see `crisp.hw.devices.protocol.Device`.

    way: one of WAYS; None: the fastest of those that memory suffices for. progress: called with
    the share of the weights that has been read.

    Raises CrispError if memory is too little, and for a way that this machine does not allow.
    """
    weights, pool = store.spec.routed_bytes, slots * store.spec.block_bytes
    needs = {"memory": weights + pool, "mapped": weights, "disk": pool}
    candidates = WAYS if way is None else (way,)
    free = available_bytes()
    room = None if free is None else max(0, free - HEADROOM)
    ways = [one for one in candidates if room is None or needs[one] <= room]
    if room is not None and not ways:
        least = min(needs[one] for one in candidates)
        raise CrispError(
            f"{format_bytes(least)} of memory are needed, {format_bytes(room)} can be had, for "
            f"{format_bytes(HEADROOM)} are left to the system"
        )
    device = GpuDevice("unified", streams, store)
    try:
        if ways == ["disk"]:
            _from_disk(device, streams, store, slots)
        else:
            ways = [one for one in ways if one != "disk"]
            _in_memory(device, streams, store, slots, ways, progress)
    except BaseException:
        device.close()
        raise
    return device


def _from_disk(device: GpuDevice, streams: DeviceStreams, store: Store, slots: int) -> None:
    pool = Arena(streams, store.spec.block_bytes, slots, slots * store.spec.block_bytes)
    device.resources.callback(pool.close)
    if pool.pageable is not None:
        raise CrispError(f"disk: the GPU cannot reach host memory: {pool.pageable}")
    files = StoreFiles(store)
    device.resources.callback(files.close)
    source, settings = (
        DirectToPool(files, pool.chunks[0]),
        {"loads_from": "disk", "direct": files.direct},
    )
    device.load_from(source, pool.chunks[0], settings, files)


def _in_memory(
    device: GpuDevice,
    streams: DeviceStreams,
    store: Store,
    slots: int,
    ways: list[str],
    progress: Callable[[float], None] | None,
) -> None:
    """Read the weights into memory, then use the fastest of these ways."""
    arena = load_arena(streams, store, store.spec.routed_bytes, progress)
    device.resources.callback(arena.close)
    if arena.pageable is not None:
        if "memory" not in ways:
            raise CrispError(f"mapped: the GPU cannot reach host memory: {arena.pageable}")
        ways = ["memory"]
    sources: dict[str, tuple[BlockSource, Any]] = {}  # by way: the source, and the kernels' pool
    if "memory" in ways:
        pool = device_pool(streams, store, slots)
        sources["memory"] = FromArena(streams, store, arena, pool), pool
    if "mapped" in ways:
        sources["mapped"] = MappedBlocks(store, slots), arena.chunks[0]
    figures, chosen = dict[str, int](), ways[0]
    if len(sources) > 1:
        for way, (source, rows) in sources.items():
            device.load_from(source, rows, {})
            load, compute = _median_times(device, streams, store)
            figures |= {f"{way}_load_ns": load, f"{way}_compute_ns": compute}
        chosen = fastest(figures)
    source, rows = sources[chosen]
    settings = {"loads_from": chosen, "pageable": arena.pageable, **figures}
    device.load_from(source, rows, settings)


def fastest(figures: dict[str, int]) -> str:
    """Return ``mapped`` or ``memory``, whichever takes less time for an expert.

    Half of all uses are taken to be hits, which need no copy into the pool.
    """
    copied = figures["memory_load_ns"] // 2 + figures["memory_compute_ns"]
    return "mapped" if figures["mapped_compute_ns"] <= copied else "memory"


def _median_times(device: GpuDevice, streams: DeviceStreams, store: Store) -> tuple[int, int]:
    """Return the median times of loading an expert and of computing it for one row, in ns."""
    spec, loads, computations = store.spec, list[int](), list[int]()
    slots, one = range(spec.n_blocks), np.zeros(1, np.int64)
    row = streams.empty(1, spec.d_model, dtype=TORCH_TYPES[store.dtype])
    streams.launch(row.zero_)
    hidden = device.place(row)
    for expert in range(min(_TRIALS, spec.n_experts)):
        loads.append(time_operation(device, partial(device.copy, Copy(0, expert, 0, slots))))
        batch = ExpertBatch(expert, one, one + spec.n_blocks, np.ones(1, np.float32), hidden)
        blocks = BlockRange(batch, 0, slots)
        for _ in range(2):  # the first of all compiles the kernels
            took = time_operation(device, partial(device.compute, blocks))
        computations.append(took)
    return int(median(loads)), int(median(computations))


def time_operation(device: GpuDevice, begin: Callable[[Done], None]) -> int:
    """Run one operation of a device, wait for its end, and return its time in ns."""
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
