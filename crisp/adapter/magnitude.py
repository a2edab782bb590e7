"""Magnitudes of a real model's experts, from the inputs of its MoE layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.extras import import_extra
from crisp.model.spec import ModelSpec
from crisp.policy import Policy
from crisp.policy.magnitude import LARGEST, coefficients
from crisp.profile import Profile


class MagnitudePredictor:
    """Foretells what each expert contributes for a token, see `crisp.policy.magnitude`."""

    def __init__(self, spec: ModelSpec, profile: Profile) -> None:
        """Raise CrispError for a profile without coefficients."""
        self._coefficients = coefficients(spec, profile)
        self._placed: dict[int, tuple[Any, Any]] = {}  # layer -> [experts, d_model], [experts]

    def all(self, layer: int, hidden: Any) -> NDArray[np.float16]:
        """Return the magnitudes of all experts, [n, experts]; hidden [n, d_model]: the input."""
        torch = import_extra("torch")
        if layer not in self._placed:
            whole = torch.from_numpy(self._coefficients[layer].astype(np.float32))
            whole = whole.to(hidden.device)
            self._placed[layer] = whole[:, :-1].contiguous(), whole[:, -1].contiguous()
        with torch.no_grad():
            logs = torch.nn.functional.linear(hidden.detach().float(), *self._placed[layer])
            most = math.log(LARGEST)
            predicted = logs.clamp(-most, most).exp().half().cpu().numpy()
        result: NDArray[np.float16] = predicted
        return result

    def of(self, layer: int, hidden: Any, experts: NDArray[np.int16]) -> NDArray[np.float16]:
        """Return the magnitudes of chosen experts [n, k], -1 = absent."""
        return pick(self.all(layer, hidden), experts)


def pick(magnitudes: NDArray[np.float16], experts: NDArray[np.int16]) -> NDArray[np.float16]:
    """Return of magnitudes [n, experts] those of the chosen experts [n, k]; absent (-1): 1."""
    ids = np.maximum(experts, 0).astype(np.int64)
    chosen = np.take_along_axis(magnitudes, ids, 1)
    return np.where(experts < 0, np.float16(1), chosen)


def predictor(policy: Policy, spec: ModelSpec, profile: Profile) -> MagnitudePredictor | None:
    """Return what foretells magnitudes, if the policy asks; CrispError where it cannot be told."""
    return MagnitudePredictor(spec, profile) if policy.predicts else None
