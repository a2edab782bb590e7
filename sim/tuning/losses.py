"""Which measured widths are worth it: losses from ``crisp eval``, and a front."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from sys import float_info
from typing import Any, TypeVar

from crisp.errors import CrispError
from crisp.policy import Budget, named

T = TypeVar("T")
VERSION = 1  # of what is read
_SHOWN = 30  # characters of what was expected to be something else


@dataclass(frozen=True)
class Loss:
    """The measured quality loss of a width policy."""

    policy: str
    width: str
    cache: str
    scope: str
    unit: str
    budget: str | None  # as it was asked for; None: nothing was cached
    loss: float  # increase of perplexity over the full model's: 0.02 is 2 %
    interval: tuple[float, float] | None
    rescale: str = "none"
    magnitude: str = "none"


@dataclass(frozen=True)
class Losses:
    """The measurements in a file; the full model, which loses nothing, stands first."""

    model: str
    expert_blocks: int  # that an expert was cut into
    rows: list[Loss]
    dtype: str | None = (
        None  # of experts' weights; this and what follows: None where it is not told
    )
    profile: str | None = None  # digest of the counts that widths were decided by
    weights: str | None = None  # of a prepared model, their hash


def read_losses(path: Path) -> Losses:
    """Read the measurements in a file; CrispError unless ``crisp eval --json`` wrote it."""
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
        rows = [_loss(result, f"{path}: row {n}") for n, result in enumerate(results, 1)]
        settings = results[-1]["settings"]  # the first one is of the model as it is
        model, blocks, origin = (
            settings["model"],
            settings["expert_blocks"],
            _origin_fields(settings),
        )
        for text in (model, *filter(None, origin.values())):
            text.encode()  # raises one of those below for what is no text that can be printed
        if all(result["metrics"]["ratio"] is not None for result in results):
            raise CrispError(
                f"{path}: lacks the row of the full model, the one without a ratio, as crisp eval "
                "--json writes it first"
            )
        if type(blocks) is not int or blocks < 1:
            raise CrispError(
                f"{path}: expert_blocks: found {_shown(blocks)}, expected a whole number above 0"
            )
        return Losses(model, blocks, rows, **origin)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise CrispError(f"{path}: is not what crisp eval --json writes") from error


def _origin_fields(settings: dict[str, Any]) -> dict[str, str | None]:
    run, profile = settings.get("run"), settings.get("profile") or {}
    matches = [
        re.search(pattern, run or "")
        for pattern in (r"experts in (\w+)", r"published in (\w+)", r"^(\w+)")
    ]
    return {
        "dtype": next((one[1] for one in matches if one), None),
        "profile": profile.get("sha256"),
        "weights": profile.get("weights"),
    }


def _loss(result: dict[str, Any], where: str) -> Loss:
    policy, metrics = result["settings"]["policy"], result["metrics"]
    budget = result["settings"]["budget"]
    if "routing" in policy:
        raise CrispError(
            f"{where}: measured with routing {policy['routing']}, which a simulation follows only "
            "roughly; the router's own choice was expected"
        )
    if metrics["ratio"] is None:  # what the others are compared with
        return Loss("lru", "full", "lru", "layer", "expert", None, 0.0, (0.0, 0.0))
    loss, interval = _increase(metrics["ratio"], f"{where}: ratio"), metrics["ratio_interval"]
    if interval is not None:
        low, high = (_increase(end, f"{where}: ratio_interval") for end in interval)
        if low > high:
            raise CrispError(f"{where}: ratio_interval: found {interval}, expected the lower first")
        interval = low, high
    row = Loss(
        policy=str(policy["name"]),
        width=str(policy["width"]),
        cache=str(policy["cache"]),
        scope=str(policy["scope"]),
        unit=str(policy["unit"]),
        budget=None if budget is None else str(budget["asked"]),
        loss=loss,
        interval=interval,
        rescale=str(policy.get("rescale", "none")),
        magnitude=str(policy.get("magnitude", "none")),
    )
    try:
        named(
            row.policy, width=row.width, cache=row.cache, scope=row.scope, unit=row.unit,
            rescale=row.rescale, magnitude=row.magnitude, prefetch="none",
        )  # fmt: skip
        if row.budget is not None:
            Budget.parse(row.budget)
    except CrispError as error:
        raise CrispError(f"{where}: {error}") from error
    return row


def _increase(ratio: Any, where: str) -> float:
    """Return what is lost at a ratio of perplexities; CrispError for no such ratio."""
    if type(ratio) not in (int, float) or not 0 < ratio <= float_info.max:  # which no NaN is
        raise CrispError(f"{where}: found {_shown(ratio)}, expected a finite number above 0")
    return float(ratio) - 1


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def same_budget(budget: str, measured: str | None) -> bool:
    """Return whether two spellings mean the same budget.

    >>> same_budget("10%", "0.1"), same_budget("10%", "20%"), same_budget("10%", None)
    (True, False, False)
    """
    if measured is None:
        return False
    one, other = Budget.parse(budget), Budget.parse(measured)
    return (one.share, one.n_bytes) == (other.share, other.n_bytes)


def front(points: Iterable[T], loss: Callable[[T], float], cost: Callable[[T], float]) -> list[T]:
    """Return the points that no other beats, by rising loss: each costs less than all before.

    >>> front([(0.0, 9), (0.1, 5), (0.2, 7), (0.3, 1)], lambda p: p[0], lambda p: p[1])
    [(0.0, 9), (0.1, 5), (0.3, 1)]
    """
    best: list[T] = []
    for point in sorted(points, key=lambda point: (loss(point), cost(point))):
        if not best or cost(point) < cost(best[-1]):
            best.append(point)
    return best
