"""The table of width policies by name."""

from __future__ import annotations

from collections.abc import Callable

from crisp.policy.widths.base import Full, Single, Tiered, Uniform, WidthPolicy
from crisp.policy.widths.contribution import Contribution, ContributionResident
from crisp.policy.widths.saliency import Saliency
from crisp.policy.widths.skipping import Drop, ResidentFloor, Skip, SkipContribution
from crisp.policy.widths.solver import Solver

WIDTHS: dict[str, Callable[..., WidthPolicy]] = {
    "full": Full,
    "uniform": Uniform,
    "single": Single,
    "tiered": Tiered,
    "skip": Skip,
    "skip-contribution": SkipContribution,
    "drop": Drop,
    "contribution": Contribution,
    "contribution-resident": ContributionResident,
    "saliency": Saliency,
    "resident": ResidentFloor,
    "solver": Solver,
}
