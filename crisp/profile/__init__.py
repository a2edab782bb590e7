"""Counts of combinations, the tiers drawn from them, and roles (paper, 2.1, 3.3.1 and 3.3.2)."""

from crisp.profile.counts import Profile, anchors
from crisp.profile.following import Following
from crisp.profile.roles import dominant
from crisp.profile.tiers import COLD, HOT, WARM, tiers

__all__ = ["COLD", "HOT", "WARM", "Following", "Profile", "anchors", "dominant", "tiers"]
