"""The cuda device: a GPU with its own memory, behind PCIe.

The whole store is copied to page-locked host memory, if there is room for it; else blocks come from
the disk each time, through two page-locked buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crisp.errors import CrispError
from crisp.hw.devices.gpu.arena import Arena, load_arena
from crisp.hw.devices.gpu.device import GpuDevice
from crisp.hw.devices.gpu.sources import BlockSource, FromArena, FromDisk
from crisp.hw.devices.gpu.streams import DeviceStreams
from crisp.hw.memory import available_bytes
from crisp.hw.store.block_io import StoreFiles
from crisp.hw.store.reader import Store
from crisp.units import format_bytes

HEADROOM = 2_000_000_000  # bytes of host memory that are left to the system
STAGING = 1 << 24  # bytes of each of the two buffers between the disk and the device


def cuda(
    streams: DeviceStreams,
    store: Store,
    slots: int,
    *,
    host_limit: int | None = None,
    progress: Callable[[float], None] | None = None,
    staging: int = STAGING,
) -> GpuDevice:
    """Open a GPU with a pool of ``slots`` slots; see `crisp.hw.devices.protocol.Device`.

    host_limit: bytes of host memory that a copy of the weights may take; None: all that is
    available, less 2 GB. progress: called with the share of the weights that has been read.
    staging: bytes of each buffer between disk and device, a multiple of 4096.

    Raises CrispError if memory of either kind is too little, or a file cannot be read.
    """
    device = GpuDevice("cuda", streams, store)
    try:
        pool = device_pool(streams, store, slots)
        files: StoreFiles | None = None
        room, free = host_limit, available_bytes()
        if room is None:
            room = store.spec.routed_bytes if free is None else free - HEADROOM
        if store.spec.routed_bytes <= room:
            arena = load_arena(streams, store, progress=progress)
            device.resources.callback(arena.close)
            source: BlockSource = FromArena(streams, store, arena, pool)
            settings: dict[str, Any] = {"loads_from": "memory", "pageable": arena.pageable}
        else:
            files = StoreFiles(store)
            device.resources.callback(files.close)
            buffers = Arena(streams, staging, 2)
            device.resources.callback(buffers.close)
            source = FromDisk(streams, files, buffers, pool)
            settings = {"loads_from": "disk", "pageable": buffers.pageable, "direct": files.direct}
            settings["room"] = max(0, room)  # bytes, for weights
        device.load_from(source, pool, settings, files)
    except BaseException:
        device.close()
        raise
    return device


def device_pool(streams: DeviceStreams, store: Store, slots: int) -> Any:
    """Allocate slots in device memory: uint8 [slots, stride]. CrispError if there is no room."""
    size, free = slots * store.spec.block_bytes, streams.free_bytes()
    if size > free:
        raise CrispError(
            f"a pool of {slots:,} blocks needs {format_bytes(size)} of device memory, "
            f"{format_bytes(free)} can be had; a smaller --budget was expected"
        )
    return streams.empty(slots, store.spec.block_bytes, dtype="uint8")
