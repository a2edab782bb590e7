"""A loss asked for in the place of a threshold: the policy whose measured loss lies within it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy.cache import Budget
from crisp.policy.policy import Policy, named
from crisp.policy.widths.saliency import Saliency
from crisp.profile.loss_curve import POLICY, LossCurve, Promise


def within_loss(
    policy: Policy, loss: Fraction, spec: ModelSpec, budget: Budget, curve: LossCurve | None
) -> tuple[Policy, Promise]:
    """Return the policy with the threshold that keeps the loss, and what is promised of it.

    Of the measured budgets the largest counts that is no larger than ``budget``: with more memory
    the same threshold loses less. Raises CrispError for another policy than `POLICY` or one with
    other parts, without a curve, and for a budget below all that were measured.
    """
    check_promising(policy)
    if curve is None:
        raise no_curve(policy)
    held = sum(budget.capacity(spec, policy.cache))
    shares = [
        share
        for share in curve.budgets
        if sum(Budget(str(share), share, None).capacity(spec, policy.cache)) <= held
    ]
    if not shares:
        raise CrispError(
            f"budget '{budget.text}': losses were measured for {float(curve.budgets[0]):.0%} and "
            "more; crisp prepare --loss-curve takes other budgets"
        )
    promise = curve.promise(shares[-1], loss)
    return replace(policy, width=Saliency(promise.share)), promise


def no_curve(policy: Policy) -> CrispError:
    """Return the error for a loss that is asked for where none was measured."""
    return CrispError(
        f"policy {policy.name}: what thresholds lose was not measured; give the --metadata of "
        "crisp prepare --loss-curve"
    )


def check_promising(policy: Policy) -> None:
    """Raise CrispError unless losses are measured of a policy, whatever its threshold."""
    if policy.name != POLICY:
        raise CrispError(f"--loss: is for policy {POLICY}, found {policy.name}")
    usual, given = named(POLICY).to_dict(), policy.to_dict()
    for part in ("width", "cache", "scope", "rescale", "routing", "magnitude"):
        if given.get(part) != usual.get(part):
            raise CrispError(
                f"--loss: was measured for policy {POLICY} as it is, without another --{part}"
            )
