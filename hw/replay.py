"""Replay a trace under a policy on real hardware.

The routing is the trace's; loads and the experts' computations are real, on random activations.
There is no router and no attention: between two events stands only the time that deciding takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np

from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.hardware.energy import Meter
from crisp.hardware.profile import HardwareProfile
from crisp.hw.devices.batch import expert_batches
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.devices.protocol import Device
from crisp.hw.devices.slots import Slots, slots_needed
from crisp.hw.executor import Executor
from crisp.hw.measured_run import measured_run
from crisp.hw.store.reader import TORCH_TYPES, Store
from crisp.hw.telemetry.metering import metering, power_model
from crisp.run.case import Case
from crisp.run.result import Run
from crisp.run.timeline import Recorder, Sink
from crisp.scheduler.scheduler import EventScheduler
from crisp.scheduler.workload import Event, Step, union


def replay(
    case: Case,
    store: Store,
    options: DeviceOptions,
    *,
    hardware: HardwareProfile | None = None,
    meter: Meter | None = None,
    modelled_energy: bool = False,
    sinks: Sequence[Sink] = (),
    progress: Callable[[int], None] | None = None,
    watch: Callable[[EventScheduler], None] | None = None,
    outputs: Callable[[Any], None] | None = None,
) -> Run:
    """Run a case on a device, with experts from ``store``.

    hardware: gives times to orders that need them, and power figures with modelled_energy; else
    energy is the meter's. sinks, progress: as in `crisp.sim.simulate.simulate`.
    watch: called with the scheduler when an event is over. outputs: called with each event's
    outputs, [rows, d_model] float32.

    Raises CrispError for a store of another geometry, an oracle, and a device that fails.
    """
    store.check(case.spec)
    if case.policy.cache.rule.oracle:
        raise CrispError(
            f"policy {case.policy.name}: {case.policy.oracle} is an oracle that no device can "
            "follow; crisp simulate can"
        )
    cost = case.order_cost(hardware)
    scheduler, workload = case.scheduler(cost), case.workload()
    recorder = Recorder(sinks)
    needed = slots_needed(case.spec, case.capacity(), scheduler.ahead is not None)
    model = power_model(hardware, modelled_energy)
    with closing(options.open(store, needed)) as device, metering(meter, model) as metered:
        executor = Executor(case.spec, scheduler, device, Slots(case.spec, needed), recorder, watch)
        activations = _Activations(store, device)
        executor.preload()
        metered.start(executor.zero)
        step: Step | None = None
        lookup_ns = 0
        for event in workload.events(case.steps(progress)):
            if event.step is not step:
                executor.end_step(step)
                if step is not None and step.phase != event.step.phase:
                    metered.sample()
                step = event.step
            if event.experts is None:
                continue
            with executor.at_rest() if workload.looks else nullcontext():
                begin = perf_counter_ns()
                event = workload.choose(event, executor.residents)
                assert event.experts is not None
                widths = workload.widths(event, executor.residents)
                tasks = union(event.experts, widths)
                lookup_ns += perf_counter_ns() - begin
                make_batches = partial(
                    expert_batches,
                    np.array(event.experts),
                    np.array(widths),
                    workload.weights(event),
                    activations.rows(event),
                )
                routed = workload.routed(event) if scheduler.weighs else None
                out = executor.event(
                    event.layer, tasks, event.guess, routed, make_batches, len(widths)
                )
            if outputs is not None:
                outputs(out())
        executor.end_step(step)
        total_ns = executor.finish()
        metered.stop()
        description = options.describe(device)
    return measured_run(
        case,
        description,
        store.describe(),
        hardware if cost or model else None,
        executor,
        total_ns,
        workload.skipped,
        metered.energy,
        lookup_ns,
    )


class _Activations:
    """Random rows to compute with, the same in every run."""

    def __init__(self, store: Store, device: Device) -> None:
        self._store, self._device = store, device
        self._placed: dict[int, Any] = {}

    def rows(self, event: Event) -> Any:
        """Return the input of an event: [rows, d_model] in the store's type, on the device."""
        torch, n = import_extra("torch"), len(event.step.rows)
        if n not in self._placed:
            random = torch.Generator().manual_seed(0)
            rows = torch.randn(n, self._store.spec.d_model, generator=random)  # [n, d_model]
            rows = rows.to(getattr(torch, TORCH_TYPES[self._store.dtype]))
            self._placed[n] = self._device.place(rows)
        return self._placed[n]
