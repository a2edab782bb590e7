"""Prefetchers: what the link loads for the next layer when the event's own loads are issued."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def first_seen(guess: Iterable[int]) -> list[int]:
    """Distinct present experts in order of first appearance.

    >>> first_seen([3, 1, -1, 3, 2])
    [3, 1, 2]
    """
    return [expert for expert in dict.fromkeys(guess) if expert >= 0]


@dataclass(frozen=True)
class Prefetch:
    """A prefetcher by name.

    ``previous``: the experts that the previous token used in the next layer (for a batch: that
    layer's last event). ``guess``: what the next layer's router says of this layer's input, as the
    trace recorded it. ``frequent``: where most tokens of this layer's combination went, in the
    profile. ``perfect``, an oracle: the tasks of the next event, by first appearance.
    """

    name: str

    def predicted(self, guess: Iterable[int], used: Sequence[int]) -> Sequence[int]:
        """Experts of the next layer, most wanted first: from a guess, or the last use.

        guess: what the trace recorded, what is usual, or for ``perfect`` what will be.
        """
        if self.name in ("guess", "frequent", "perfect"):
            return first_seen(guess)
        return used if self.name == "previous" else ()


PREFETCHERS = ("none", "previous", "guess", "frequent", "perfect")
