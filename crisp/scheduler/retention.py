"""The residency of a cache that retains what is worth most: it decides when an event starts.

Of the blocks that are resident and those that the event asks for, it keeps as many of the greatest
saliency as the part of the budget holds, wherever they are: a block that is loaded now may be let
go, and one of the event's own experts may too. What goes and is not asked for leaves at once. What
goes and is asked for moves to the staging buffer, where it stays until it has been computed: so
much of the budget is free for what is loaded and stays. Nothing is copied for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from crisp.errors import InvariantError
from crisp.model.spec import ModelSpec
from crisp.policy.cache import Cache
from crisp.policy.retention import fade, retain
from crisp.scheduler.residency import Eviction, Residency, StartingState
from crisp.scheduler.tasks import Task

Routed = Iterable[tuple[int, int, int]]
"""(expert, mean router weight, largest) of an event, as `crisp.policy.retention.routed_weights`
gives it."""


class RetainingResidency(Residency):
    """A `Residency` whose contents after an event are planned at the event's start."""

    def __init__(self, spec: ModelSpec, cache: Cache, start: StartingState) -> None:
        """start: with what entries are worth."""
        super().__init__(spec, cache, start)
        assert start.worth is not None
        self._expected, self._sizes = start.worth
        self.recent = list(self._expected)  # [entries]: mean weight, which forgets
        self._blocks = spec.n_blocks
        self._kept = [0] * spec.n_routed  # blocks after the current event
        self._held = [0] * spec.n_routed
        self._fixed = [0] * spec.n_routed

    def note(self, row: int, routed: Routed | None) -> None:
        """Take note of what an event of MoE layer ``row`` is routed to."""
        if routed is None:
            raise InvariantError("the cache was not told what the event is routed to")
        low = row * self._experts
        fade(self.recent, low, low + self._experts)
        for expert, weight, _ in routed:
            self.recent[low + expert] += weight // 10

    def plan(self, part: int, tasks: Sequence[Task]) -> list[Eviction]:
        """Decide what stays after the event of these tasks; return what leaves the budget now.

        Of the event's own resident blocks an expert's worth may go at the most: one more of the two
        experts that staging holds is always free for loads.
        """
        low, high = self._bounds[part]
        kept, held, fixed, resident = self._kept, self._held, self._fixed, self.resident
        kept[low:high], held[low:high] = resident[low:high], [0] * (high - low)
        fixed[low:high] = [0] * (high - low)
        for task in tasks:
            entry = task.entry
            if task.staged:  # what follows is not in the budget, and a prefix has no hole
                fixed[entry], held[entry] = 1, resident[entry]
            else:
                held[entry] = min(resident[entry], task.width)
                kept[entry] = max(resident[entry], task.width)
        retain(
            kept, held, fixed, self._expected, self.recent, self._sizes, self._blocks,
            low, high, self.capacity[part], self._blocks,
        )  # fmt: skip
        both = zip(kept[low:high], resident[low:high], strict=True)
        goes = [entry for entry, (stays, had) in enumerate(both, low) if stays < had]
        return [self._let_go(entry, part) for entry in goes]

    def kept(self, task: Task) -> int:
        """Return how many leading blocks of a task's expert stay."""
        return self._kept[task.entry]

    def admissible(self, part: int, missing: int) -> int:
        """Return how many of ``missing`` blocks fit; a prefetch takes free room alone."""
        return min(missing, self.capacity[part] - self.used[part])

    def _let_go(self, entry: int, part: int) -> Eviction:
        had, stays = self.resident[entry], self._kept[entry]
        self.resident[entry] = stays
        self.used[part] -= had - stays
        self.landed -= had - stays
        if self.protected[entry]:
            self.locked[part] -= had - stays
        return Eviction(*divmod(entry, self._experts), stays, had)
