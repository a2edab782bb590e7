"""Setup: what all runs of an experiment share, loaded and checked before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Any

from crisp.errors import CrispError, check_whole, wrong_type
from crisp.files import check_path
from crisp.hardware.measured import check_store
from crisp.hardware.profile import HardwareProfile
from crisp.model.geometry import ReadModel, read_named
from crisp.model.spec import STORE_INDEX, ModelSpec
from crisp.policy import Budget, Policy, named
from crisp.policy.promise import within_loss
from crisp.profile.loss_curve import POLICY
from crisp.run.case import Case, Conditions
from crisp.run.inputs import LoadedInputs, TraceSource, load_inputs
from crisp.scheduler.workload import chosen_rows
from crisp.trace import RoutingTrace
from crisp.trace.bundled import resolve_trace
from crisp.trace.fitting import fit_to_trace
from crisp.units import parse_fraction


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything of an experiment but its policies and budgets.

    >>> setup = load_setup("tiny-mixtral-kjv", model="mixtral-8x7b", bits="4.25")
    >>> setup.case("crisp", "20%", limit=100).capacity()
    [16, 16, 16, 8, 8, 8]
    """

    name: str  # of the trace
    source: TraceSource
    inputs: LoadedInputs
    whole: ModelSpec  # all layers of the model
    spec: ModelSpec  # the trace's layers
    machine: str  # what it runs on, in a few words
    hardware: HardwareProfile | None  # None: no simulated one, and none was asked for
    conditions: Conditions
    notes: tuple[str, ...] = ()  # where numbers of the model are from that one would not expect
    loss: Fraction | None = None  # that policy saliency may cost, in the place of its threshold

    def policy(self, name: str, **parts: Any) -> Policy:
        """Return a named policy, with parts replaced as `crisp.policy.policy` takes them."""
        has_guess = self.inputs.trace.guess is not None
        return named(name, has_guess=has_guess, seed=self.conditions.seed, **parts)

    def policies(self, names: Iterable[str], **parts: Any) -> list[Policy]:
        """Return several named policies with the same parts replaced."""
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise wrong_type(names, "policies", "a list of names")
        return [self.policy(name, **parts) for name in names]

    def case(self, policy: Policy | str, budget: Budget | str, **conditions: Any) -> Case:
        """Return the case of a policy within a budget, with some conditions replaced.

        policy, budget: or how they are spelled. Raises CrispError for a budget that does not fit
        the model, and for what cannot be spelled so.
        """
        setup = self
        if conditions:
            setup = replace(self, conditions=replace(self.conditions, **conditions))
        if isinstance(policy, str):
            policy = setup.policy(policy)
        if isinstance(budget, str):
            budget = Budget.parse(budget)
        if not isinstance(policy, Policy):
            raise wrong_type(policy, "policy", "the name of a policy, or a Policy")
        if not isinstance(budget, Budget):
            raise wrong_type(budget, "budget", "a text such as '10%', '0.1' or '4GB', or a Budget")
        budget.capacity(self.spec, policy.cache)  # raises CrispError
        if self.loss is not None and policy.name == POLICY:
            curve = self.inputs.loss_curve
            policy, _ = within_loss(policy, self.loss, self.spec, budget, curve)
        return self.inputs.case(self.spec, policy, budget, setup.conditions)

    def rows(self) -> int:
        """Return how many rows are run; CrispError if there are none."""
        conditions = self.conditions
        return len(chosen_rows(self.inputs.trace, conditions.phase, conditions.limit))


def load_setup(
    trace: str | Path,
    *,
    model: str | Path | ModelSpec | None = None,
    hardware: HardwareProfile | None = None,
    machine: str | None = None,
    conditions: Conditions | None = None,
    profile: str | Path | None = None,
    metadata: str | Path | None = None,
    bits: str | float | Fraction | None = None,
    block: int | None = None,
    top_k: int | None = None,
    layers: int | None = None,
    loss: Fraction | None = None,
    load: Callable[[TraceSource], LoadedInputs] = load_inputs,
    read: ReadModel = read_named,
) -> Setup:
    """Load a trace, by name or path, and fit a model's geometry to it.

    model: a geometry, or a built-in model, a config.json, a store or a TOML file; None: the traced
    one.
    hardware: what is simulated, if anything is, and machine: what runs instead, in a few words.
    profile, metadata: where counts of combinations come from instead of the trace's first half.
    bits: stored bits of a routed weight. block: neurons of a block. top_k: the trace's k, where it
    is not the model's. layers: leading layers that are run. loss: what policy saliency may cost, in
    the place of its threshold: 0.02 is 2 % of perplexity. load: how a source is loaded. read: how
    a model is read by its name or path.

    Raises CrispError for anything that does not fit together, and for values of other types.
    """
    path = resolve_trace(check_path(trace, "trace"))
    source = TraceSource.resolve(path, profile=profile, metadata=metadata, layers=layers)
    _check_types(hardware, conditions, bits, {"block": block, "top_k": top_k})
    stored = None
    if bits is not None:
        stored = parse_fraction(bits if isinstance(bits, Fraction) else str(bits), "--bits")
    spec, index = None, None
    notes: tuple[str, ...] = ()
    if isinstance(model, ModelSpec):
        spec = model
    elif model is not None:
        index = check_path(model, "model") / STORE_INDEX
        geometry = read(model, stored)
        spec, notes = geometry.spec, geometry.notes
    if index is not None and index.exists() and hardware is not None and hardware.tables:
        check_store(hardware.tables, json.loads(index.read_bytes()), hardware.name)
    inputs = load(source)
    if spec is None:
        recorded = inputs.trace.header.spec
        if recorded is None:
            raise CrispError(f"{path}: does not say how large its model is; give --model")
        spec = ModelSpec.from_dict(recorded, str(path))
    prepared = inputs.prepared
    if block is None and prepared is not None and prepared.config_hash == spec.config_hash:
        block = prepared.block  # what was prepared runs in the blocks it was prepared in
    spec = spec.with_(bits=stored, block=block)
    fitted = fit_to_trace(spec, inputs.trace, top_k)
    if source.profile is not None and inputs.counted is not None:
        _check_profile(source.profile, inputs.counted, spec, fitted, top_k)
    setup = Setup(
        name=str(trace) if str(path) != str(trace) else path.name,
        source=source,
        inputs=inputs,
        whole=spec,
        spec=fitted,
        machine=machine or (hardware.name if hardware else "unknown"),
        hardware=hardware,
        conditions=conditions or Conditions(),
        notes=notes,
        loss=loss,
    )
    setup.rows()  # raises CrispError
    return setup


def _check_types(
    hardware: object, conditions: object, bits: object, whole_numbers: Mapping[str, object]
) -> None:
    """Raise CrispError for a value of another type than its name asks for; None is of any."""
    if not isinstance(hardware, HardwareProfile | None):
        name = "a HardwareProfile, as crisp.sim.hardware_profile(name) returns"
        raise wrong_type(hardware, "hardware", name)
    if not isinstance(conditions, Conditions | None):
        raise wrong_type(conditions, "conditions", "a Conditions")
    if isinstance(bits, bool) or not isinstance(bits, str | Real | None):
        raise wrong_type(bits, "bits", "a number")
    for name, value in whole_numbers.items():
        if value is not None:
            check_whole(value, name)


def other_geometry(spec: ModelSpec, trace: RoutingTrace) -> bool:
    """Return whether a trace was recorded from another model than ``spec``, as far as it says."""
    header = trace.header
    if header.config_hash is not None and spec.config_hash is not None:
        return header.config_hash != spec.config_hash
    return header.model is not None and header.model != spec.name


def _check_profile(
    path: Path, counted: RoutingTrace, spec: ModelSpec, fitted: ModelSpec, top_k: int | None
) -> None:
    """Raise CrispError unless the profile's trace has the same geometry as the one that is run."""
    try:
        other = fit_to_trace(spec, counted, top_k)
    except CrispError as error:
        raise CrispError(f"--profile {path}: {error}") from error
    if other != fitted:
        raise CrispError(
            f"--profile {path}: {other.n_layers} layers, but the simulated trace has "
            f"{fitted.n_layers}"
        )
