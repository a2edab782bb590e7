"""The run of an executor that has finished."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crisp.hardware.energy import EnergyOf
from crisp.hardware.profile import HardwareProfile
from crisp.hw.executor import Executor
from crisp.run.case import Case
from crisp.run.finish import finish
from crisp.run.result import Run


def measured_run(
    case: Case,
    device: Mapping[str, Any],
    store: Mapping[str, Any],
    hardware: HardwareProfile | None,
    executor: Executor,
    total_ns: int,
    skipped: int,
    energy: EnergyOf,
    lookup_ns: int,
) -> Run:
    """Return its `Run`.

    device, store: as they describe themselves. hardware: the profile that gave times or power
    figures, if one did. total_ns, lookup_ns: the run's time, and what turning the routers' answers
    into widths took of it.
    """
    settings = case.settings("hw", None if hardware is None else hardware.to_dict())
    return finish(
        settings | {"device": dict(device), "store": dict(store)},
        case.spec,
        cost=None,
        scheduler=executor.scheduler,
        sums=executor.recorder.sums,
        log=executor.log,
        total_ns=total_ns,
        skipped=skipped,
        initial=case.start().resident,
        energy=energy,
        host=executor.host_times(lookup_ns),
    )
