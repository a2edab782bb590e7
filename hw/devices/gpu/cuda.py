"""The cuda device: a GPU with its own memory, behind PCIe.

A copy of the whole store lies in page-locked host memory, if there is room for it; else blocks come
from the disk each time, by way of two page-locked buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crisp.errors import CrispError
from crisp.hw.devices.gpu.arena import Arena, filled
from crisp.hw.devices.gpu.device import GpuDevice
from crisp.hw.devices.gpu.sources import FromArena, FromDisk, Source
from crisp.hw.devices.gpu.streams import Streams
from crisp.hw.memory import available
from crisp.hw.store.block_io import Files
from crisp.hw.store.reader import Store
from crisp.units import show_bytes

HEADROOM = 2_000_000_000  # bytes of host memory that are left to everybody else
STAGING = 1 << 24  # bytes of each of the two buffers between the disk and the device


def cuda(
    streams: Streams,
    store: Store,
    slots: int,
    *,
    host_limit: int | None = None,
    progress: Callable[[float], None] | None = None,
    staging: int = STAGING,
) -> GpuDevice:
    """A device with a pool of so many slots; see `crisp.hw.devices.protocol.Device`.

    host_limit: bytes of host memory that a copy of the weights may take; None: what there is, less
    2 GB. progress: told the share of the weights that has been read. staging: a multiple of 4096.

    Raises CrispError if memory of either kind is too little, or a file cannot be read.
    """
    device = GpuDevice("cuda", streams, store)
    try:
        pool = device_pool(streams, store, slots)
        files: Files | None = None
        room, free = host_limit, available()
        if room is None:
            room = store.spec.routed_bytes if free is None else free - HEADROOM
        if store.spec.routed_bytes <= room:
            arena = filled(streams, store, progress=progress)
            device.resources.callback(arena.close)
            source: Source = FromArena(streams, store, arena, pool)
            how: dict[str, Any] = {"loads_from": "memory", "pageable": arena.pageable}
        else:
            files = Files(store)
            device.resources.callback(files.close)
            buffers = Arena(streams, staging, 2)
            device.resources.callback(buffers.close)
            source = FromDisk(streams, files, buffers, pool)
            how = {"loads_from": "disk", "pageable": buffers.pageable, "direct": files.direct}
            how["room"] = max(0, room)  # bytes, for weights
        device.load_from(source, pool, how, files)
    except BaseException:
        device.close()
        raise
    return device


def device_pool(streams: Streams, store: Store, slots: int) -> Any:
    """Slots in device memory; CrispError if there is no room."""
    size, free = slots * store.spec.block_bytes, streams.free_bytes()
    if size > free:
        raise CrispError(
            f"a pool of {slots:,} blocks needs {show_bytes(size)} of device memory, "
            f"{show_bytes(free)} can be had; a smaller --budget was expected"
        )
    return streams.empty(slots, store.spec.block_bytes, dtype="uint8")
