"""Every width policy by its name."""

from __future__ import annotations

from collections.abc import Callable

from crisp.policy.contribution import Contribution, ContributionResident
from crisp.policy.skipping import Drop, Resident, Skip, SkipContribution
from crisp.policy.solver import Solver
from crisp.policy.width import Full, Single, Tiered, Uniform, WidthPolicy

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
    "resident": Resident,
    "solver": Solver,
}
