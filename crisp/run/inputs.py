"""Inputs of a run, from files to memory: the routing that is run, and the counts beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from crisp.errors import CrispError, check_whole
from crisp.files import check_path
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Policy
from crisp.profile import Profile
from crisp.profile.loss_curve import LossCurve
from crisp.profile.metadata import Metadata
from crisp.run.case import Case, Conditions
from crisp.scheduler.workload import split
from crisp.trace import RoutingTrace
from crisp.trace.bundled import resolve_trace

_CACHED = 4  # sources that stay open


@dataclass(frozen=True)
class TraceSource:
    """The files that a run's routing and counts come from: picklable, so any process opens them."""

    trace: Path
    profile: Path | None = None  # a trace to count combinations in
    metadata: Path | None = None  # of a prepared model, which holds the counts
    layers: int | None = None  # leading layers of the trace that are run; None: all

    @classmethod
    def resolve(
        cls,
        trace: str | Path,
        *,
        profile: str | Path | None = None,
        metadata: str | Path | None = None,
        layers: int | None = None,
    ) -> TraceSource:
        """Return the source of files, or of bundled traces by name; paths become absolute.

        Raises CrispError for a trace that is nowhere, for both ``profile`` and ``metadata``, and
        for values of other types.
        """
        path = resolve_trace(check_path(trace, "trace"))
        if layers is not None:
            check_whole(layers, "layers")
        if profile is not None and metadata is not None:
            raise CrispError("--profile and --metadata: both give counts of combinations; give one")
        # Absolute: a worker process need not stand in the same folder.
        return cls(
            path.absolute(),
            None if profile is None else resolve_trace(check_path(profile, "profile")).absolute(),
            None if metadata is None else check_path(metadata, "metadata").absolute(),
            layers,
        )


@dataclass(frozen=True, eq=False)
class LoadedInputs:
    """The routing that is run, and the counts of combinations that decide about it."""

    trace: RoutingTrace  # the rows that are run
    profile: Profile
    split: str | None = None  # which rows were counted and which are run, in words
    counted: RoutingTrace | None = None  # what was counted; None: metadata holds the counts alone
    file: Mapping[str, str] | None = None  # name and sha256 of the whole trace, if it is a file
    prepared: ModelSpec | None = None  # the geometry in the metadata
    loss_curve: LossCurve | None = None  # of the metadata

    @classmethod
    def from_trace(
        cls, trace: RoutingTrace, *, file: Mapping[str, str] | None = None
    ) -> LoadedInputs:
        """Count the first half of a trace, to run the rest; CrispError for a single row."""
        counted, rest, how = split(trace)
        return cls(rest, Profile.from_trace(counted), how, counted, file)

    def case(
        self,
        spec: ModelSpec,
        policy: Policy,
        budget: Budget,
        conditions: Conditions | None = None,
    ) -> Case:
        """Return the case of a policy within a budget; spec: from `fit_to_trace`."""
        return Case(
            self.trace,
            spec,
            policy,
            budget,
            self.profile,
            conditions or Conditions(),
            self.split,
            self.file,
            counted=self.counted,
        )


def load_inputs(source: TraceSource) -> LoadedInputs:
    """Map a source's trace and count its combinations, or take the counts from metadata.

    Without a profile of its own, the first half of the trace is counted and the rest is run. Raises
    CrispError for files that are damaged or do not belong together.
    """
    whole = RoutingTrace.load(source.trace)
    file = {"name": source.trace.name, "sha256": whole.digest()}
    layers = whole.layers if source.layers is None else source.layers
    if not 1 <= layers <= whole.layers:
        raise CrispError(f"--layers {layers}: {source.trace} has {whole.layers}")
    trace = whole.first_layers(layers)
    if source.metadata is not None:
        metadata = Metadata.load(source.metadata)
        _check_metadata(metadata, whole, source.metadata)
        return LoadedInputs(
            trace,
            metadata.profile().first_layers(layers),
            f"profile: {source.metadata.name}, prepared from {metadata.spec.name}; simulated: all "
            "rows",
            file=file,
            prepared=metadata.spec,
            loss_curve=metadata.loss_curve,
        )
    if source.profile is None:
        return LoadedInputs.from_trace(trace, file=file)
    counted = RoutingTrace.load(source.profile)
    counted = counted.first_layers(min(layers, counted.layers))
    how = f"profile: all {counted.rows:,} rows of {source.profile.name}; simulated: all rows"
    return LoadedInputs(trace, Profile.from_trace(counted), how, counted, file)


@lru_cache(maxsize=_CACHED)
def cached_inputs(source: TraceSource) -> LoadedInputs:
    """Return what `load_inputs` does, loaded once; files are taken not to change meanwhile."""
    return load_inputs(source)


def _check_metadata(metadata: Metadata, trace: RoutingTrace, path: Path) -> None:
    """Raise CrispError unless the metadata is of the traced model."""
    spec, header = metadata.spec, trace.header
    if (spec.n_layers, spec.n_experts) != (trace.layers, header.n_experts):
        raise CrispError(
            f"--metadata {path}: {spec.n_layers} layers of {spec.n_experts} experts, but the trace "
            f"has {trace.layers} of {header.n_experts}"
        )
    hashes = spec.config_hash, header.config_hash
    if None not in hashes and hashes[0] != hashes[1]:
        raise CrispError(
            f"--metadata {path}: belongs to {spec.name}; the trace was recorded from another "
            f"model, {header.model}"
        )
