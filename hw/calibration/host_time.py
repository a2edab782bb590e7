"""Measure the time between two events of a replay: of deciding, summing and handing over."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from crisp.hardware.measured import TimeCurve
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.replay import replay
from crisp.hw.store.reader import Store
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.run.case import Case, Conditions
from crisp.run.sinks import FullTimeline
from crisp.run.timeline import END, KIND, LAYER, START, STEP
from crisp.trace import DECODE, Header, RoutingTrace

ROWS = (1, 4, 16)
_STEPS, _LEAST = 64, 8  # steps of one row; at least, of many rows, which compute longer
_WARM_UP = 3  # steps that do not count: the first one loads what the others find resident


def measure_host_times(store: Store, options: DeviceOptions) -> TimeCurve:
    """Return the median time between events by their rows, from replays of one layer's events.

    Every row takes the same experts, one block of each; they are resident after the first event.
    """
    return TimeCurve(ROWS, tuple(Fraction(int(_median(store, options, rows))) for rows in ROWS))


def _median(store: Store, options: DeviceOptions, rows: int) -> float:
    """Replay steps of ``rows`` rows; return the median time between events in ns."""
    spec = store.spec.first_layers(store.spec.moe_layers[0] + 1)
    sink = FullTimeline()
    case = Case(
        trace=_trace(spec, rows),
        spec=spec,
        policy=named("lru", width="uniform(0.001)", unit="block"),
        budget=Budget("", None, spec.top_k * spec.block_bytes),
        profile=Profile.empty(spec),
        conditions=Conditions(batch=rows),
    )
    replay(case, store, options, sinks=[sink])
    timeline = sink.rows
    layers = timeline[(timeline[:, KIND] == LAYER) & (timeline[:, STEP] >= _WARM_UP)]
    return float(np.median(layers[:, END] - layers[:, START]))


def _trace(spec: ModelSpec, rows: int) -> RoutingTrace:
    """Return a trace of ``rows`` sequences side by side, whose last layer alone is MoE."""
    steps = _WARM_UP + max(_LEAST, _STEPS // rows)
    experts = np.full((rows * steps, spec.n_layers, spec.top_k), -1, np.int16)
    experts[:, -1] = np.arange(spec.top_k)
    return RoutingTrace(
        experts=experts,
        sequence=np.repeat(np.arange(rows, dtype=np.int32), steps),
        position=np.tile(np.arange(steps, dtype=np.int32), rows),
        phase=np.full(rows * steps, DECODE, np.uint8),
        header=Header(n_experts=spec.n_experts, top_k=spec.top_k, ordered=True, origin="synthetic"),
    )
