"""What the commands that run on a device have in common: its options, and going without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crisp.hw.devices.options import Options
    from crisp.model.spec import ModelSpec
    from crisp.run.case import Case


def device_options(
    device: str,
    *,
    threads: int = 1,
    link_limit: str | None = None,
    verify: bool = False,
    host_limit: str | None = None,
    loads_from: str | None = None,
) -> Options:
    """The device as the flags have it; CrispError for what cannot be, or not together."""
    from crisp.hw.devices.options import Options
    from crisp.units import parse_bytes, parse_rate

    return Options(
        device,
        threads,
        None if link_limit is None else parse_rate(link_limit, "--link-limit"),
        verify,
        None if host_limit is None else parse_bytes(host_limit, "--host-limit"),
        loads_from,
        _Reading(),
    )


class _Reading:
    """Shows how much of the weights is read while a device opens, if it reads them then."""

    def __init__(self) -> None:
        self._bar = ExitStack()
        self._update: Callable[[float], None] | None = None

    def __call__(self, share: float) -> None:
        from crisp.cli.output.progress import progress_share

        if self._update is None:
            self._update = self._bar.enter_context(progress_share("reading weights"))
        self._update(share)
        if share >= 1:
            self._bar.close()
            self._update = None


def rehearsed(cases: Iterable[tuple[str, Case]]) -> str:
    """What a dry run says: that everything fits together, and the slots that each run takes."""
    lines = ["dry run: all of it fits together; no device was opened, nothing run or written"]
    for name, case in cases:
        lines.append(f"{name}: {_slots(case.spec, case.capacity(), case.policy.prefetch.name)}")
    return "\n".join(lines)


def _slots(spec: ModelSpec, capacity: Sequence[int], prefetch: str) -> str:
    from crisp.hw.devices.slots import slots_needed
    from crisp.units import show_bytes

    slots = slots_needed(spec, capacity, prefetch != "none")
    return (
        f"a pool of {slots:,} blocks, {show_bytes(slots * spec.block_bytes)}: "
        f"{show_bytes(sum(capacity) * spec.block_bytes)} of budget, the rest for staging"
    )
