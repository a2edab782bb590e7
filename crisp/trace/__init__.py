"""Routing traces: which experts a real model routed each token to, layer by layer."""

from crisp.trace.file import Header, RoutingTrace

__all__ = ["Header", "RoutingTrace"]
