"""What is measured for the policy `saliency`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from crisp.policy.magnitude import Coefficients
from crisp.prepare.saliency.rescaling import Factors


@dataclass(frozen=True, eq=False)
class SaliencyMeasurements:
    """What the policy `saliency` needs of each MoE layer besides contributions, all by layer."""

    rescaling: Mapping[int, Factors]  # [E, blocks + 1]
    sensitivities: Mapping[int, float]
    tokens: int  # that sensitivities were measured on
    magnitudes: Mapping[int, Coefficients] | None = None  # [E, d_model + 1]; None: not asked for
