"""Recognise what a model's experts compute from a neuron's projections, by its numbers.

Names of activations differ between families and versions, and a class may do anything with them.
So a module is asked for the activation of a grid of gates and ups, which is compared with those
that stores and devices know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, product
from typing import Any

import numpy as np

from crisp.adapter.experts import Experts
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.model.activation import CONSTANTS, PLAIN, Activation

_POINTS = 49  # of the grid on each axis
_CONSTANT = re.compile("alpha|cap|clamp|limit")  # in names of attributes


def find_activation(experts: Experts) -> Activation:
    """Return the activation of a layer's experts.

    Raises CrispError, naming the module, for one that is none of `crisp.model.activation`.
    """
    constants = _constants(experts.module)
    reach = max([6.0, *(3 * number for number in constants if number < 1e3)])
    line = np.linspace(-reach, reach, _POINTS).astype(np.float32)
    gates, ups = (part.ravel() for part in np.meshgrid(line, line))
    found = _activate(experts, gates, ups)
    for activation in _candidates(experts.has_gate, constants):
        wide = gates.astype(np.float64), ups.astype(np.float64)
        expected = activation(*wide) if experts.has_gate else activation(wide[0])
        # float32 against float64: functions of up to 3 x `reach`, products of two
        if np.allclose(found, expected, rtol=1e-4, atol=1e-5 * max(1, np.abs(expected).max())):
            return activation
    raise CrispError(
        f"{experts.name} ({type(experts.module).__name__}): its activation is not understood"
    )


def _activate(experts: Experts, gates: Any, ups: Any) -> Any:
    """Return the module's own activation of gates and ups [n] (without a gate: of gates)."""
    torch = import_extra("torch")
    if not experts.has_gate:
        projected = torch.from_numpy(gates)
    elif experts.concatenated:
        projected = torch.from_numpy(np.concatenate([gates, ups]))
    else:
        projected = torch.from_numpy(np.stack([gates, ups], 1).ravel())
    with torch.no_grad():
        try:
            return experts.activate(projected[None])[0].numpy()
        except RuntimeError as error:  # it has weights for each neuron
            raise CrispError(f"{experts.name}: its activation is not understood") from error


def _constants(module: Any) -> list[float]:
    """Return the limits and the like that an experts' module and its activation hold, each once."""
    act = getattr(module, "act_fn", None)
    parts: list[Any] = [module, act]
    if isinstance(act, import_extra("torch.nn").Module):
        parts += act.children()
    held = [(name, x) for part in parts for name, x in getattr(part, "__dict__", {}).items()]
    numbers = [
        float(x)
        for name, x in held
        if _CONSTANT.search(name) and isinstance(x, int | float) and 0 < x < float("inf")
    ]
    return list(dict.fromkeys(numbers))


def _candidates(has_gate: bool, constants: list[float]) -> Iterator[Activation]:
    """Yield the activations that a module with these constants may have, the plain ones first."""
    yield from map(Activation, PLAIN)
    if has_gate:
        for kind, count in CONSTANTS.items():
            usual = [(1.702, 7.0)] if kind == "gpt_oss" else []
            for values in chain(usual, product(constants, repeat=count)):
                yield Activation(kind, *values)
