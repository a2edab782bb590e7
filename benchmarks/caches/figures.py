"""Figures of the page, from the records of all runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]
ORACLE = "belady"


class Runs:
    """Records that can be selected by what they are; several texts of one model are added up."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = list(records)

    def of(self, **what: Any) -> Runs:
        """Return the records with these parts; a missing part is None."""
        return Runs(
            one for one in self.records if all(one.get(key) == value for key, value in what.items())
        )

    def of_model(self, model: str) -> Runs:
        """Return the records of one model's traces."""
        return Runs(one for one in self.records if model_of(one["trace"]) == model)

    def values(self, key: str) -> list[Any]:
        """Return the distinct values of a part, in the order of the runs."""
        return list(dict.fromkeys(one.get(key) for one in self.records))

    def sum(self, key: str) -> float:
        """Return the sum of a metric over all runs."""
        return float(sum(one[key] for one in self.records))

    @property
    def loads(self) -> float:
        """The experts loaded a token."""
        return self._experts("blocks_loaded")

    @property
    def fewest(self) -> float:
        """The experts a token that the best of all caches would load for the same tasks."""
        return self._experts("belady_blocks")

    @property
    def speed(self) -> float:
        """The tokens a second."""
        return 1e9 * self.sum("tokens") / self.sum("total_ns")

    def _experts(self, key: str) -> float:
        (blocks,) = self.values("n_blocks")
        return self.sum(key) / blocks / self.sum("tokens")


def model_of(trace: str) -> str:
    """Return the model of a trace: the bundled ones have a text after their name."""
    return trace.rpartition("-")[0] if trace.startswith("tiny-") else trace


def models(runs: Runs) -> list[str]:
    """Return all models, those that come with the project last."""
    names = dict.fromkeys(map(model_of, runs.values("trace")))
    return sorted(names, key=lambda model: model.startswith("tiny-"))


def replayed(runs: Runs, budget: str, cache: str) -> tuple[float, float]:
    """Return the loads a token of a cache, event by event and access by access."""
    loads = []
    for by_access in (False, True):
        replays = runs.of(budget=budget, by_access=by_access)
        loads.append(
            replays.of(cache="lru").fewest if cache == ORACLE else replays.of(cache=cache).loads
        )
    return loads[0], loads[1]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def signed(share: float, digits: int = 1) -> str:
    """Format a share in per cent, with its sign.

    >>> signed(0.234), signed(-0.0004)
    ('+23.4 %', '0.0 %')
    """
    text = f"{100 * share:+.{digits}f}"
    return ("0." + "0" * digits if float(text) == 0 else text.replace("-", "−")) + " %"


def number(value: float) -> str:
    """Format with three digits or more.

    >>> number(60.357), number(9.8266), number(0.41)
    ('60.4', '9.83', '0.41')
    """
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
