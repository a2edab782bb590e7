"""What was promised of a loss that was asked for, in lines above the figures."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from crisp.errors import CrispError
from crisp.policy import Budget, Policy
from crisp.policy.promise import check_promising, within_loss
from crisp.profile.loss_curve import POLICY, Promise
from crisp.run.setup import Setup


def check_asked(loss: Fraction | None, policies: Iterable[Policy]) -> None:
    """Raise CrispError for a loss that is asked of none of the policies, or of one with a width."""
    named = [policy for policy in policies if policy.name == POLICY]
    if loss is not None and not named:
        raise CrispError(f"--loss: is for policy {POLICY}, which --policy does not name")
    for policy in named if loss is not None else ():
        check_promising(policy)


def describe_promises(
    setup: Setup, policies: Iterable[Policy], budgets: Iterable[Budget]
) -> list[str]:
    """Return a line for each budget in which a loss is promised; none where none was asked for."""
    if setup.loss is None or POLICY not in {policy.name for policy in policies}:
        return []
    policy = setup.policy(POLICY)
    return [
        describe_promise(
            setup.loss,
            budget,
            within_loss(policy, setup.loss, setup.spec, budget, setup.inputs.loss_curve)[1],
        )
        for budget in budgets
    ]


def describe_promise(loss: Fraction, budget: Budget, promise: Promise) -> str:
    """Return what is promised in one budget."""
    return (
        f"{'loss':<10}at most {100 * float(loss):g} % at {budget.text}: "
        f"{POLICY}({float(promise.share):g}), which at {100 * float(promise.budget):g} % lost "
        f"{100 * promise.loss:.1f} % on the curve's text, by its interval "
        f"{100 * promise.high:.1f} % at most"
    )
