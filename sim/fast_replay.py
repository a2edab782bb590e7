"""`crisp.scheduler.untimed` compiled: all rows that a layer is fed at once, event by event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError, InvariantError
from crisp.model.spec import ModelSpec
from crisp.policy import BoundWidths, Budget, Policy
from crisp.policy.magnitude import weighed
from crisp.policy.retention import units
from crisp.policy.widths import contribution
from crisp.policy.widths.base import ResidencyWidths, Widths
from crisp.profile import Profile
from crisp.scheduler.assembly import starting_state
from crisp.scheduler.untimed import Replay, ReplayCounts, RowReplay
from crisp.sim.compiling import BARE, compiled, digest, kept
from crisp.sim.fast import state as at
from crisp.sim.fast import streams
from crisp.sim.fast.batches import MOST_BLOCKS
from crisp.sim.fast.event_start import access
from crisp.sim.fast.orders import rank
from crisp.sim.fast.retention import retain
from crisp.sim.fast.rules import machine_of
from crisp.sim.fast.scheduler import computed, loaded, next_compute, next_load, queue
from crisp.sim.fast.state import EXPERTS, LEFT, RESIDENT, ROW, SIZE, Ints, Machine
from crisp.sim.fast.unions import routed as routed_of

_width_on: Any = compiled(contribution.width_on)
SOURCES = streams.SOURCES + digest([contribution])


def compiled_replay(spec: ModelSpec, policy: Policy, budget: Budget, profile: Profile) -> RowReplay:
    """Return a replay of a policy's cache in a budget; one in Python where it cannot be compiled.

    Raises CrispError as `Replay` does.
    """
    plain = Replay(spec, policy, budget, profile)
    if spec.n_blocks > MOST_BLOCKS:
        return plain
    try:
        return CompiledReplay(spec, policy, budget, profile)
    except CrispError:  # a rule of a plugin that numba cannot compile
        return plain


class CompiledReplay:
    """A `Replay` that decides in compiled code, and alike."""

    def __init__(self, spec: ModelSpec, policy: Policy, budget: Budget, profile: Profile) -> None:
        """Begin; CrispError for a rule that cannot be compiled."""
        start = starting_state(spec, policy, profile, budget.capacity(spec, policy.cache))
        self.in_step = policy.cache.in_step
        self._weighs = policy.cache.rule.retains
        self._machine = machine_of(spec, policy, start, False, lambda _: 1, 1)  # nobody waits
        self._row_of = {layer: row for row, layer in enumerate(spec.moe_layers)}
        self._n = spec.n_experts

    @property
    def counts(self) -> ReplayCounts:
        """What has been counted so far."""
        places = [at.TASKS, at.HITS, at.PARTIAL, at.BLOCKS_LOADED]
        return ReplayCounts(*self._machine.now[places].tolist())

    def rows(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.float16],
        widths: BoundWidths,
        magnitudes: npt.NDArray[np.float16] | None = None,
    ) -> Widths:
        """Run an event for each of a layer's rows, see `RowReplay.rows`."""
        row, experts = self._row_of[layer], np.ascontiguousarray(experts)
        found = np.zeros(experts.shape, np.int64)
        wanted = found
        worth = weights if magnitudes is None else weighed(weights, magnitudes)
        if widths.residency:
            bits = cast(ResidencyWidths, widths).wanted(layer, experts, worth)
            wanted = bits.astype(np.int64)
        else:
            found[:] = widths.widths(layer, experts, worth, None)
        first, routed = np.zeros(0, np.int64), np.zeros((3, 0), np.int64)
        if self._weighs:
            each = units(weights)[:, None]  # [rows, 1, k]
            first, routed = routed_of(experts[:, None], each, np.arange(len(experts) + 1), self._n)
            routed[0] += row * self._n
        scratch = np.zeros((2, experts.shape[1]), np.int64)
        follow(
            self._machine, row, experts, found, wanted, widths.residency, first, routed, scratch
        )  # fmt: skip
        return found.astype(np.int16)


def _enclosing(sources: str) -> Callable[..., None]:
    def follow(
        machine: Machine, row: int, experts: npt.NDArray[np.int16], widths: Ints, wanted: Ints,
        depends: bool, first_routed: Ints, routed: Ints, scratch: Ints,
    ) -> None:  # fmt: skip
        """Run an event of ``row`` for each row of ``experts`` [rows, k].

        widths [rows, k]: given, or returned if they depend on what is resident, and on the blocks
        ``wanted``. scratch [2, k]: entries and widths of an event's tasks.
        """
        sources  # noqa: B018  (enclosed: see `kept`)
        rules, load_ns, _, now, entries, parts, lists, slots, jobs, custom, sizes = machine
        entry, width = scratch[0], scratch[1]
        now[ROW], now[SIZE] = row, load_ns[row, -1]
        for event in range(experts.shape[0]):
            count = 0
            for place in range(experts.shape[1]):
                expert = experts[event, place]
                if expert < 0:
                    continue
                entry[count] = row * rules[EXPERTS] + expert
                if depends:
                    widths[event, place] = _width_on(
                        entries[RESIDENT, entry[count]], wanted[event, place]
                    )
                width[count] = widths[event, place]
                count += width[count] > 0
            access(rules, now, entries, parts, slots, entry, width, row, 0, count, custom)
            retain(
                rules, now, entries, parts, slots, sizes, first_routed, routed, event, row, count
            )
            rank(rules, load_ns[row], now, slots, jobs, load_ns, count, custom)  # none asks times
            queue(rules, now, slots, count)
            while now[LEFT]:
                issued = next_load(rules, now, entries, parts, lists, slots, custom)
                if issued:
                    loaded(rules, now, slots)
                slot = next_compute(rules, now, slots)
                if slot < 0 and not issued:
                    raise InvariantError("nothing can be loaded and nothing can be computed")
                while slot >= 0:
                    computed(now, entries, parts, slots, slot)
                    slot = next_compute(rules, now, slots)

    return kept(follow, **BARE)


follow = _enclosing(SOURCES)
