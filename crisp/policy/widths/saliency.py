"""Widths by saliency: one threshold for all layers, each as sensitive as it was measured to be.

`contribution-resident` gives every layer the same share of blocks that are worth loading. But
layers are not equally sensitive: here a block is worth loading where router weight x sensitivity of
the layer x contribution of the block, about the loss that leaving it out adds, reaches one
threshold everywhere, such that the asked share is worth it of all that tokens are routed to.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy.widths.base import WidthPolicy
from crisp.policy.widths.contribution import (
    ResidentThresholdWidths,
    check_blocks,
    contributions,
    least_worth,
)
from crisp.profile import Profile


@dataclass(frozen=True)
class Saliency(WidthPolicy):
    """All resident blocks, and those worth loading; ``share``: worth it, of all layers' blocks."""

    profiled: ClassVar = True
    counted: ClassVar = True
    share: Fraction = Fraction(1, 2)

    def bind(self, spec: ModelSpec, profile: Profile, ordered: bool) -> ResidentThresholdWidths:
        """Set the threshold; CrispError without contributions, weights or sensitivities."""
        check_blocks(spec, "saliency")
        sizes = contributions(spec, profile, "saliency")
        if profile.sensitivities is None:
            raise CrispError(
                "width saliency: asks how sensitive each layer is, which this metadata does not "
                "say; crisp prepare measures it"
            )
        sizes = sizes * profile.sensitivities.astype(np.float64)[:, None, None]
        least = least_worth(profile, sizes, self.share, np.array(spec.moe_layers))
        return ResidentThresholdWidths(sizes, np.full(len(sizes), least))
