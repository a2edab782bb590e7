"""Routing traces: which experts a real model routed each token to, layer by layer."""

from crisp.trace.file import DECODE, PREFILL, Header, RoutingTrace

__all__ = ["DECODE", "PREFILL", "Header", "RoutingTrace"]
