"""The connection to transformers models: record what routers decide, execute a policy's widths.

One place serves every family. Transformers keeps the routed experts of a layer in one module whose
forward is ``(hidden [n, d], top_k_index [n, k], top_k_weights [n, k]) -> [n, d]`` and which looks
its implementation up in a common registry. By intercepting that forward CRISP sees exactly what the
router returned, and decides what is computed.
"""

from crisp.adapter.activations import find_activation
from crisp.adapter.experts import Experts, execute
from crisp.adapter.layout import ExpertLayout, Handler, MoeLayer, expert_layout, intercept_experts
from crisp.adapter.magnitude import MagnitudePredictor, predictor
from crisp.adapter.record import (
    RecordedRouting,
    RoutingRecorder,
    look_ahead,
    rank_by_weight,
    record_routing,
)
from crisp.adapter.widths import AttachedPolicy, ExecutionTally, attach, check_rescaling

__all__ = [
    "AttachedPolicy",
    "ExecutionTally",
    "ExpertLayout",
    "Experts",
    "Handler",
    "MagnitudePredictor",
    "MoeLayer",
    "RecordedRouting",
    "RoutingRecorder",
    "attach",
    "check_rescaling",
    "execute",
    "expert_layout",
    "find_activation",
    "intercept_experts",
    "look_ahead",
    "predictor",
    "rank_by_weight",
    "record_routing",
]
