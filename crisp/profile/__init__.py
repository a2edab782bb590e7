"""Counts of combinations, the tiers drawn from them, and roles (paper, 2.1, 3.3.1 and 3.3.2)."""

from crisp.profile.combinations import Profile, anchors
from crisp.profile.roles import dominant
from crisp.profile.tiers import COLD, HOT, WARM, tiers
from crisp.profile.transitions import Following

__all__ = ["COLD", "HOT", "WARM", "Following", "Profile", "anchors", "dominant", "tiers"]
