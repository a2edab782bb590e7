"""What goes wrong with hardware while it runs."""

from __future__ import annotations

from crisp.errors import CrispError


class DeviceError(CrispError):
    """A stream failed, or what it read is not what was stored. One line, as for every user."""
