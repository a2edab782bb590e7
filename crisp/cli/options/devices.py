"""Options of the commands that run on a device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crisp.hw.devices.options import DeviceOptions
    from crisp.hw.store.reader import Store


def open_store(path: Path) -> Store:
    """Open a store to run from; note on standard error where it lies, if not on a disk."""
    from crisp.hw.store.file_system import memory_file_system
    from crisp.hw.store.reader import Store

    store = Store.open(path)
    memory = memory_file_system(path)
    if memory is not None:
        print(
            f"note: {path} lies in memory ({memory}): loads are copies there, not reads of a disk",
            file=sys.stderr,
        )
    return store


def is_automatic(budgets: Sequence[str], device: str) -> bool:
    """Return whether a budget is auto; CrispError for a device that is not the processor."""
    from crisp.errors import CrispError
    from crisp.policy.cache import AUTO

    if AUTO not in budgets:
        return False
    if device != "cpu":
        raise CrispError(
            f"--budget {AUTO}: is of device cpu, found {device}; give bytes or a share"
        )
    return True


def device_options(
    device: str,
    *,
    threads: int | None = None,
    link_limit: str | None = None,
    verify: bool = False,
    host_limit: str | None = None,
    loads_from: str | None = None,
    read: str = "direct",
    progress: Callable[[float], None] | None = None,
) -> DeviceOptions:
    """Return the device that flags describe; CrispError for what cannot be, or not together.

    progress: called with the share of the weights that is read, if they are while it opens.
    """
    from crisp.hw.devices.options import DeviceOptions
    from crisp.units import parse_bytes, parse_rate

    return DeviceOptions(
        device,
        threads,
        None if link_limit is None else parse_rate(link_limit, "--link-limit"),
        verify,
        None if host_limit is None else parse_bytes(host_limit, "--host-limit"),
        loads_from,
        read,
        progress,
    )
