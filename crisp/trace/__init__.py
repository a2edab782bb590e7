"""Routing traces: which experts a real model routed each token to, layer by layer."""

from crisp.trace.header import Header
from crisp.trace.routing_trace import DECODE, PREFILL, RoutingTrace

__all__ = ["DECODE", "PREFILL", "Header", "RoutingTrace"]
