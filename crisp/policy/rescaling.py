"""Rescaling: what is executed of an expert stands for what is left out.

An expert's output is multiplied by a factor that depends on how many of its blocks are executed:
the one with which the executed part is nearest to the whole over the calibration text, in least
squares. Whoever sums the experts' outputs multiplies the router's weight by it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.profile import Profile

MEASURED = "measured"
RESCALES = ("none", MEASURED)

Factors = npt.NDArray[np.float32]


def rescaling(spec: ModelSpec, profile: Profile) -> Factors:
    """Return the profile's factors [layers, experts, blocks + 1], 1 at the full width.

    Raises CrispError where there are none, or those of other blocks.
    """
    if profile.rescaling is None:
        raise CrispError(
            "rescale: asks what an expert's output is to be multiplied with, which this metadata "
            "does not say; crisp prepare measures it"
        )
    if profile.rescaling.shape[2] != spec.n_blocks + 1:
        raise CrispError(
            f"rescale: {spec.name} has {spec.n_blocks} blocks an expert, but factors were measured "
            f"for {profile.rescaling.shape[2] - 1}"
        )
    return profile.rescaling


def factors(of_layer: Factors, experts: npt.NDArray[Any], widths: npt.NDArray[Any]) -> Factors:
    """Return the factor of each (token, expert) [rows, k], by its width in blocks.

    of_layer [experts, blocks + 1]; experts [rows, k], -1 = absent; widths [rows, k].
    """
    chosen: Factors = of_layer[np.maximum(experts, 0), widths]
    return chosen
