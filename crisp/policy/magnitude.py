"""Magnitude: how much an expert contributes for this token, relative to its mean over all tokens.

What a block contributes in the mean is known beforehand; what a token makes of an expert can be
foretold from the layer's input, before any of its blocks is there. The magnitude is

    exp(<coefficients of the expert, input> + intercept),

within 1/8 and 8. It multiplies the router's weight where widths are decided, and nothing else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.profile import Profile

PREDICTED = "predicted"
MAGNITUDES = ("none", PREDICTED)
LARGEST = 8.0  # magnitude; 1 / LARGEST is the smallest

Coefficients = npt.NDArray[np.float16]


def coefficients(spec: ModelSpec, profile: Profile) -> Coefficients:
    """Return the profile's coefficients [layers, experts, d_model + 1], intercepts last.

    Raises CrispError where there are none, or those of other inputs.
    """
    if profile.magnitudes is None:
        raise CrispError(
            "magnitude: asks what an input foretells of an expert's output, which this metadata "
            "does not say; crisp prepare --magnitudes measures it"
        )
    if profile.magnitudes.shape[2] != spec.d_model + 1:
        raise CrispError(
            f"magnitude: {spec.name} has inputs of {spec.d_model} numbers, but coefficients were "
            f"measured for {profile.magnitudes.shape[2] - 1}"
        )
    return profile.magnitudes


def weighed(
    weights: npt.NDArray[np.float16], magnitudes: npt.NDArray[np.float16]
) -> npt.NDArray[np.float32]:
    """Return router weight x magnitude, what widths are decided by: exact, as both are float16."""
    return weights.astype(np.float32) * magnitudes.astype(np.float32)
