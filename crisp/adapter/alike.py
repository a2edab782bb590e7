"""Experts outside transformers' common interface that are laid out as those inside it."""

from __future__ import annotations

import inspect
from typing import Any

from crisp.adapter.calls import Intercept, intercept_call, intercept_scaled_inputs

FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
"""Attributes by which transformers says how an experts' module is laid out."""
_SCALED_INPUTS = ("Llama4TextExperts",)  # classes whose router's weights multiply inputs


def is_alike(module: Any) -> bool:
    """Return whether a module keeps and calls its experts as the common interface does.

    It has three-dimensional matrices of the usual names and no other parameters, and is called with
    hidden states, index and weights; or it is of a class with an interception of its own.
    """
    parameters = getattr(module, "_parameters", {})
    matrices = parameters.get("gate_up_proj"), parameters.get("down_proj")
    if len(parameters) != 2 or any(matrix is None or matrix.ndim != 3 for matrix in matrices):
        return False
    if not isinstance(getattr(module, "num_experts", None), int):
        return False
    called = len(inspect.signature(type(module).forward).parameters) == 4  # self, too
    return called or type(module).__name__ in _SCALED_INPUTS


def call_of(module: Any) -> Intercept:
    """Return how the call of an experts' module is intercepted."""
    if type(module).__name__ in _SCALED_INPUTS:
        return intercept_scaled_inputs
    return intercept_call


def flags_of(module: Any) -> dict[str, Any]:
    """Return the flags of an experts' module; told by its shapes where it has none of them.

    A value that is no bool, or None, is not understood.
    """
    flags = {flag: getattr(module, flag, None) for flag in FLAGS}
    if any(value is not None for value in flags.values()) or not is_alike(module):
        return flags
    up, down = module.gate_up_proj.shape, module.down_proj.shape
    straight, transposed = (2 * down[2], down[1]), (down[2], 2 * down[1])
    if up[1:] not in (straight, transposed) or straight == transposed:
        return flags
    known = {"has_gate": True, "has_bias": False, "is_concatenated": True}
    return flags | known | {"is_transposed": up[1:] == transposed, "has_post_expert_norm": False}
