"""The loss curve of a prepared model: by how much perplexity grows, threshold by threshold.

It is measured on text, for the policy saliency in a few budgets; with it a loss can be asked for in
the place of a threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.units import parse_fraction

POLICY = "saliency"
"""The policy that losses are measured of."""
SPARE = Fraction(3, 4)
"""Of a loss that is asked for, what may be used up on the text of the curve: another text may lose
more."""
MOST = 0.2
"""Larger losses are not measured, nor can they be asked for."""


class Promise(NamedTuple):
    """A share of blocks worth loading, and what it cost on the text of the curve."""

    share: Fraction
    loss: float
    high: float  # the upper end of its 95 % interval
    budget: Fraction  # that was measured


@dataclass(frozen=True, eq=False)
class LossCurve:
    """Relative increases of perplexity, by budget and share of blocks worth loading."""

    tokens: int  # that were scored
    budgets: tuple[Fraction, ...]  # rising: shares of all routed experts
    shares: tuple[Fraction, ...]  # rising
    losses: npt.NDArray[np.float64]  # [budgets, shares]
    highs: npt.NDArray[np.float64]  # upper ends of 95 % intervals, of the text that loses most

    def promise(self, budget: Fraction, loss: Fraction) -> Promise:
        """Return the least share whose interval of the loss ends within `SPARE` of ``loss``.

        budget: one that was measured. Between two measured shares the ends of their intervals are
        joined by a line; a larger share never counts as losing more. At a share of 1 nothing is
        lost.
        """
        row = self.budgets.index(budget)
        shares = np.array([*map(float, self.shares), 1.0])
        highs = np.maximum.accumulate([0.0, *self.highs[row][::-1]])[::-1]  # falls with the share
        losses = np.array([*self.losses[row], 0.0])
        most = float(loss * SPARE)
        place = int(np.argmax(highs <= most))
        least = shares[place]
        if place:
            rise = (highs[place - 1] - most) / (highs[place - 1] - highs[place])
            least = shares[place - 1] + rise * (shares[place] - shares[place - 1])
        share = min(Fraction(-int(-least * 1000 // 1), 1000), Fraction(1))
        at = float(share)
        return Promise(
            share,
            float(np.interp(at, shares, losses)),
            float(np.interp(at, shares, highs)),
            budget,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the curve, safe for JSON."""
        return {
            "tokens": self.tokens,
            "budgets": [str(budget) for budget in self.budgets],
            "shares": [str(share) for share in self.shares],
            "losses": [[round(value, 6) for value in row] for row in self.losses.tolist()],
            "highs": [[round(value, 6) for value in row] for row in self.highs.tolist()],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], where: str) -> LossCurve:
        """Return what `to_dict` wrote; CrispError, naming ``where``, for anything else."""
        if not isinstance(content, Mapping):
            raise CrispError(f"{where}: its loss curve is damaged: it is no dict")
        try:
            curve = cls(
                int(content["tokens"]),
                _rising(content["budgets"]),
                _rising(content["shares"]),
                np.array(content["losses"], np.float64),
                np.array(content["highs"], np.float64),
            )
        except KeyError as error:
            raise CrispError(f"{where}: its loss curve is damaged: it lacks {error}") from error
        except (ArithmeticError, TypeError, ValueError, CrispError) as error:
            raise CrispError(f"{where}: its loss curve is damaged: {error}") from error
        if curve.tokens < 1:
            raise CrispError(f"{where}: its loss curve is damaged: {curve.tokens} tokens")
        shape = len(curve.budgets), len(curve.shares)
        for values in (curve.losses, curve.highs):
            if values.shape != shape or not np.isfinite(values).all():
                raise CrispError(f"{where}: its loss curve is damaged: expected {shape} numbers")
            if (values <= -1).any():  # perplexity below nothing
                raise CrispError(f"{where}: its loss curve is damaged: a gain of 100 % or more")
        return curve


def _rising(texts: Sequence[str]) -> tuple[Fraction, ...]:
    values = tuple(Fraction(text) for text in texts)
    if not values or any(not 0 < value <= 1 for value in values):
        raise CrispError("shares above 0 and of 1 at most were expected")
    if list(values) != sorted(set(values)):
        raise CrispError("rising shares were expected")
    return values


def parse_loss(text: str) -> Fraction:
    """Return a loss such as ``2%`` or ``.02``; CrispError unless above 0 and `MOST` at most."""
    loss = parse_fraction(text, f"--loss '{text}'")
    if not 0 < loss <= MOST:
        raise CrispError(f"--loss {text}: expected more than 0 and at most {MOST:.0%}, such as 2%")
    return loss


def read_budgets(text: str) -> list[Fraction]:
    """Return budgets such as ``10%,20%``, rising; CrispError for what is no share."""
    expected = f"--loss-curve {text}: expected shares of all experts, such as 10%,20%"
    try:
        budgets = sorted({parse_fraction(item.strip(), "--loss-curve") for item in text.split(",")})
    except CrispError as error:
        raise CrispError(expected) from error
    if not all(0 < budget < 1 for budget in budgets):
        raise CrispError(expected)
    return budgets
