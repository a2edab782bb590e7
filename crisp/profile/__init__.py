"""Counts of combinations and the tiers drawn from them (paper, sections 2.1 and 3.3.1)."""

from crisp.profile.counts import Profile, anchors
from crisp.profile.tiers import COLD, HOT, WARM, tiers

__all__ = ["COLD", "HOT", "WARM", "Profile", "anchors", "tiers"]
