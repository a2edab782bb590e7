"""Which measured widths are worth it: losses from ``crisp eval``, and a front."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from crisp.errors import CrispError
from crisp.policy import Budget

T = TypeVar("T")
VERSION = 1  # of what is read


@dataclass(frozen=True)
class Loss:
    """What a width policy costs in quality, as it was measured."""

    policy: str
    width: str
    cache: str
    scope: str
    unit: str
    budget: str | None  # as it was asked for; None: nothing was cached
    loss: float  # increase of perplexity over the full model's: 0.02 is 2 %
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Losses:
    """All that a file holds. The full model, which loses nothing, stands first."""

    model: str
    expert_blocks: int  # that an expert was cut into
    rows: list[Loss]


def read_losses(path: Path) -> Losses:
    """The measurements in a file; CrispError if it is not one that ``crisp eval --json`` wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CrispError(f"{path}: is not JSON, as crisp eval --json writes it") from error
    try:
        if content["version"] != VERSION:
            raise CrispError(f"{path}: made by another version of crisp")
        results = content["results"]
        rows = [_loss(result) for result in results]
        settings = results[0]["settings"]
        return Losses(str(settings["model"]), int(settings["expert_blocks"]), rows)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CrispError(f"{path}: is not what crisp eval --json writes") from error


def _loss(result: dict[str, Any]) -> Loss:
    policy, metrics = result["settings"]["policy"], result["metrics"]
    budget = result["settings"]["budget"]
    if metrics["ratio"] is None:  # what the others are compared with
        return Loss("lru", "full", "lru", "layer", "expert", None, 0.0, (0.0, 0.0))
    interval = metrics["ratio_interval"]
    return Loss(
        policy=str(policy["name"]),
        width=str(policy["width"]),
        cache=str(policy["cache"]),
        scope=str(policy["scope"]),
        unit=str(policy["unit"]),
        budget=None if budget is None else str(budget["asked"]),
        loss=float(metrics["ratio"]) - 1,
        interval=None if interval is None else (float(interval[0]) - 1, float(interval[1]) - 1),
    )


def same_budget(asked: str, measured: str | None) -> bool:
    """Whether two spellings mean the same budget.

    >>> same_budget("10%", "0.1"), same_budget("10%", "20%"), same_budget("10%", None)
    (True, False, False)
    """
    if measured is None:
        return False
    one, other = Budget.parse(asked), Budget.parse(measured)
    return (one.share, one.n_bytes) == (other.share, other.n_bytes)


def front(points: Iterable[T], loss: Callable[[T], float], cost: Callable[[T], float]) -> list[T]:
    """The points that no other one beats, by rising loss: each costs less than all before it.

    >>> front([(0.0, 9), (0.1, 5), (0.2, 7), (0.3, 1)], lambda p: p[0], lambda p: p[1])
    [(0.0, 9), (0.1, 5), (0.3, 1)]
    """
    best: list[T] = []
    for point in sorted(points, key=lambda point: (loss(point), cost(point))):
        if not best or cost(point) < cost(best[-1]):
            best.append(point)
    return best
