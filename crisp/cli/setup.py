"""What the runs of a table share: routing, geometry and machine, checked before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crisp.cli.cells import ENGINES, Cell, Routing, Source, open_source
from crisp.cli.output.words import counted
from crisp.errors import CrispError
from crisp.hardware.measured import check_store
from crisp.hardware.profile import HardwareProfile
from crisp.model.spec import STORE_INDEX, ModelSpec
from crisp.policy import Budget, Policy, named
from crisp.run.case import Conditions
from crisp.scheduler.workload import chosen_rows
from crisp.sim.hardware import profile as hardware_profile
from crisp.trace import RoutingTrace
from crisp.trace.bundled import resolve
from crisp.trace.fitting import fit
from crisp.units import exact, show_bytes


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything of a table but its policies and budgets."""

    name: str  # of the trace
    source: Source
    routing: Routing
    whole: ModelSpec  # all layers of the model
    spec: ModelSpec  # the trace's layers
    machine: str  # what it runs on, in a few words
    hardware: HardwareProfile | None  # None: no simulated one, and none was asked for
    conditions: Conditions

    def policies(self, names: Sequence[str], **parts: Any) -> list[Policy]:
        """Named policies with parts replaced, as `crisp.policy.policy` takes them."""
        has_guess, seed = self.routing.simulated.guess is not None, self.conditions.seed
        return [named(name, has_guess=has_guess, seed=seed, **parts) for name in names]

    def cell(self, policy: Policy, budget: Budget, engine: str = ENGINES[0]) -> Cell:
        """One run of the table; CrispError for a budget that does not fit the model."""
        budget.capacity(self.spec, policy.cache)
        return Cell(
            self.source,
            self.spec,
            self.machine,
            self.hardware,
            policy,
            budget,
            self.conditions,
            engine,
        )

    def rows(self) -> int:
        """Rows that are simulated; CrispError if there are none."""
        conditions = self.conditions
        return len(chosen_rows(self.routing.simulated, conditions.phase, conditions.limit))

    def title(self) -> list[str]:
        """The conditions, a line each: they belong to every number below them."""
        header, conditions, spec = self.routing.simulated.header, self.conditions, self.spec
        of_phase = len(chosen_rows(self.routing.simulated, conditions.phase, None))
        rows, phase = self.rows(), "" if conditions.phase == "all" else f"{conditions.phase} "
        limited = f" (the first of {of_phase:,})" if rows < of_phase else ""
        made = (
            "drawn from statistics of" if header.origin == "synthetic" else f"{header.origin} from"
        )
        layers = counted(spec.n_layers, "layer")
        if spec.n_layers < self.whole.n_layers:
            layers = f"{spec.n_layers} of {self.whole.n_layers} layers"
        lines = {
            "trace": f"{self.name}: {rows:,} {phase}rows{limited}, {made} "
            f"{header.model or 'an unnamed model'}",
            "profile": self.routing.how.removeprefix("profile: "),
            "model": f"{spec.name}, {layers}; experts in {float(spec.bits):g} bits, "
            f"{show_bytes(spec.expert_bytes)} each, {show_bytes(spec.routed_bytes)} in all",
            "hardware": self.machine,
            "run": f"phase {conditions.phase}, batch {conditions.batch}, "
            f"granularity {conditions.granularity}",
        }
        if other_geometry(spec, self.routing.simulated):
            lines["model"] += (
                f"\n{'':10}the routing is {header.model}'s, the sizes are {spec.name}'s"
            )
        return [f"{key:<10}{text}" for key, text in lines.items()]


def prepare(
    trace: str,
    *,
    model: str | None,
    hardware: str | None,
    machine: str | None = None,
    conditions: Conditions,
    profile: str | None = None,
    metadata: Path | None = None,
    bits: str | None = None,
    block: int | None = None,
    top_k: int | None = None,
    layers: int | None = None,
    opening: Callable[[Source], Routing] = open_source,
) -> Setup:
    """Open and check all that a table needs; CrispError for anything that does not fit.

    hardware: a profile by name or file; machine: what runs instead, in a few words. opening: how a
    source is opened.
    """
    path = resolve(trace)
    if profile is not None and metadata is not None:
        raise CrispError("--profile and --metadata: both give counts of combinations; give one")
    # Absolute: a worker process need not stand in the same folder.
    source = Source(
        path.absolute(),
        None if profile is None else resolve(profile).absolute(),
        None if metadata is None else metadata.absolute(),
        layers,
    )
    simulated = None if hardware is None else hardware_profile(hardware)
    machine = machine or (simulated.name if simulated else "unknown")
    spec = None if model is None else ModelSpec.named(model)
    index = None if model is None else Path(model) / STORE_INDEX
    if index is not None and index.exists() and simulated is not None and simulated.tables:
        check_store(simulated.tables, json.loads(index.read_bytes()), simulated.name)
    stored = None if bits is None else exact(bits, "--bits")
    routing = opening(source)
    if spec is None:
        recorded = routing.simulated.header.spec
        if recorded is None:
            raise CrispError(f"{path}: does not say how large its model is; give --model")
        spec = ModelSpec.from_dict(recorded, str(path))
    prepared = routing.prepared
    if block is None and prepared is not None and prepared.config_hash == spec.config_hash:
        block = prepared.block  # what was prepared runs in the blocks it was prepared in
    spec = spec.with_(bits=stored, block=block)
    fitted = fit(spec, routing.simulated, top_k)
    if source.profile is not None and routing.counted is not None:
        check_profile(source, routing.counted, spec, fitted, top_k)
    name = trace if str(path) != trace else path.name
    setup = Setup(name, source, routing, spec, fitted, machine, simulated, conditions)
    setup.rows()
    return setup


def check_profile(
    source: Source, counted: RoutingTrace, spec: ModelSpec, fitted: ModelSpec, top_k: int | None
) -> None:
    """Raise CrispError unless the profile's trace has the same geometry as the simulated one."""
    try:
        other = fit(spec, counted, top_k)
    except CrispError as error:
        raise CrispError(f"--profile {source.profile}: {error}") from error
    if other != fitted:
        raise CrispError(
            f"--profile {source.profile}: {other.n_layers} layers, but the simulated trace has "
            f"{fitted.n_layers}"
        )


def other_geometry(spec: ModelSpec, trace: RoutingTrace) -> bool:
    """Whether a trace was recorded from another model than ``spec``, as far as it says."""
    header = trace.header
    if header.config_hash is not None and spec.config_hash is not None:
        return header.config_hash != spec.config_hash
    return header.model is not None and header.model != spec.name
