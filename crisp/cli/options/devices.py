"""Options of the commands that run on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crisp.hw.devices.options import DeviceOptions


def device_options(
    device: str,
    *,
    threads: int = 1,
    link_limit: str | None = None,
    verify: bool = False,
    host_limit: str | None = None,
    loads_from: str | None = None,
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
        progress,
    )
