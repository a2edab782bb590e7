"""Profiles: counts of combinations, the tiers they give, and roles (paper, 2.1, 3.3.1, 3.3.2)."""

from crisp.profile.combinations import Profile, anchors
from crisp.profile.roles import dominant
from crisp.profile.tiers import COLD, HOT, WARM, tiers
from crisp.profile.transitions import Transitions

__all__ = ["COLD", "HOT", "WARM", "Profile", "Transitions", "anchors", "dominant", "tiers"]
