"""The error of hardware that fails while it runs."""

from __future__ import annotations

from crisp.errors import CrispError


class DeviceError(CrispError):
    """A stream that failed, or bytes that are not what was stored; its message is one line."""
