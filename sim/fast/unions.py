"""The tasks of every event of a batch: `crisp.scheduler.workload.union`, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.policy.widths import contribution
from crisp.sim.compiling import compiled, digest, kept
from crisp.sim.fast.state import Ints

_width_on: Any = compiled(contribution.width_on)


def _union(
    experts: npt.NDArray[np.int16],
    widths: npt.NDArray[np.int16],
    first_token: Ints,
    n_experts: int,
    upto: Ints,
    by_block: bool,
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (first task [events + 2], entry, width, grains): experts by first appearance.

    experts [token rows, MoE layers, k]; widths [MoE layers, token rows, k]; upto[b]: grains (some
    neurons) of b whole blocks. grains [tasks, 1 or blocks] are summed over rows.
    """
    rows, layers, k = experts.shape
    steps, blocks = len(first_token) - 1, len(upto) - 1
    first_task = np.zeros(steps * layers + 2, np.int64)
    entry = np.empty(rows * layers * k, np.int64)
    width = np.zeros(rows * layers * k, np.int64)
    grains = np.zeros((rows * layers * k, blocks if by_block else 1), np.int64)
    task_of = np.full(n_experts, -1, np.int64)
    tasks = 0
    for step in range(steps):
        for layer in range(layers):
            begin = tasks
            for row in range(first_token[step], first_token[step + 1]):
                for place in range(k):
                    wide, expert = widths[layer, row, place], experts[row, layer, place]
                    if wide == 0:
                        continue
                    task = task_of[expert]
                    if task < begin:
                        task = task_of[expert] = tasks
                        entry[task] = layer * n_experts + expert
                        tasks += 1
                    width[task] = max(width[task], wide)
                    if by_block:
                        for block in range(wide):
                            grains[task, block] += upto[block + 1] - upto[block]
                    else:
                        grains[task, 0] += upto[wide]
            first_task[step * layers + layer + 1] = tasks
    first_task[-1] = tasks
    return first_task, entry[:tasks], width[:tasks], grains[:tasks]


def _enclosing(sources: str) -> Callable[..., tuple[Ints, Ints, Ints, Ints, Ints, Ints]]:
    def union_on(
        experts: npt.NDArray[np.int16],
        wanted: Ints,
        first_token: Ints,
        n_experts: int,
        upto: Ints,
        by_block: bool,
    ) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
        """Return the same where ``wanted`` blocks come on top of what is resident.

        Returns (first task [events + 2], entry [tasks], width, seen, bare [tasks], grains). Width,
        seen and grains are of (task, blocks that are resident)s; see `StepBatch`.
        """
        sources  # noqa: B018  (enclosed: see `kept`)
        rows, layers, k = experts.shape
        steps, blocks = len(first_token) - 1, len(upto) - 1
        states, most = blocks + 1, rows * layers * k
        first_task = np.zeros(steps * layers + 2, np.int64)
        entry = np.empty(most, np.int64)
        width = np.zeros(most * states, np.int64)
        seen = np.zeros(most * states, np.int64)
        bare = np.zeros(most, np.int64)
        grains = np.zeros((most * states, blocks if by_block else 1), np.int64)
        task_of = np.full(n_experts, -1, np.int64)
        tasks = 0
        for step in range(steps):
            for layer in range(layers):
                begin = tasks
                for row in range(first_token[step], first_token[step + 1]):
                    for place in range(k):
                        expert = experts[row, layer, place]
                        if expert < 0:
                            continue
                        task = task_of[expert]
                        if task < begin:
                            task = task_of[expert] = tasks
                            entry[task] = layer * n_experts + expert
                            tasks += 1
                        for resident in range(states):
                            wide = _width_on(resident, wanted[layer, row, place])
                            if wide == 0:
                                bare[task] += 1
                                continue
                            state = task * states + resident
                            if width[state] == 0:
                                seen[state] = row * k + place
                            width[state] = max(width[state], wide)
                            if by_block:
                                for block in range(wide):
                                    grains[state, block] += upto[block + 1] - upto[block]
                            else:
                                grains[state, 0] += upto[wide]
                first_task[step * layers + layer + 1] = tasks
        first_task[-1] = tasks
        end = tasks * states
        return first_task, entry[:tasks], width[:end], seen[:end], bare[:tasks], grains[:end]

    return kept(union_on)


def _routed(
    experts: npt.NDArray[np.int16], weights: Ints, first_token: Ints, n_experts: int
) -> tuple[Ints, Ints]:
    """Return what `crisp.policy.retention.routed_weights` does, of every event of a batch.

    experts, weights [token rows, MoE layers, k]. Returns (first [events + 1], (entry, mean weight,
    largest) [3, routed]).
    """
    rows, layers, k = experts.shape
    steps = len(first_token) - 1
    first = np.zeros(steps * layers + 1, np.int64)
    routed = np.zeros((3, rows * layers * k), np.int64)
    place_of = np.full(n_experts, -1, np.int64)
    found = 0
    for step in range(steps):
        tokens = first_token[step + 1] - first_token[step]
        for layer in range(layers):
            begin = found
            for row in range(first_token[step], first_token[step + 1]):
                for rank in range(k):
                    expert = experts[row, layer, rank]
                    if expert < 0:
                        continue
                    place = place_of[expert]
                    if place < begin:
                        place = place_of[expert] = found
                        routed[0, place] = layer * n_experts + expert
                        found += 1
                    weight = weights[row, layer, rank]
                    routed[1, place] += weight
                    routed[2, place] = max(routed[2, place], weight)
            for place in range(begin, found):
                routed[1, place] //= tokens
            first[step * layers + layer + 1] = found
    return first, routed[:, :found].copy()


def _distinct(rows: Ints) -> tuple[Ints, Ints]:
    """Return (the kind of each row, a row of each kind): equal rows are of one kind.

    By a hash table: there are few kinds of many rows, which to sort would take ten times as long.
    """
    size = 2
    while size < 2 * len(rows):
        size *= 2
    table = np.full(size, -1, np.int64)  # kinds
    kind_of_row = np.empty(len(rows), np.int64)
    row_of_kind = np.empty(len(rows), np.int64)
    kinds = 0
    for row in range(len(rows)):
        key = 0
        for value in rows[row]:
            key = (key ^ value) * 0x9E3779B97F4A7C5
        place = (key ^ (key >> 32)) & (size - 1)
        while table[place] >= 0 and (rows[row_of_kind[table[place]]] != rows[row]).any():
            place = (place + 1) & (size - 1)
        if table[place] < 0:
            table[place], row_of_kind[kinds] = kinds, row
            kinds += 1
        kind_of_row[row] = table[place]
    return kind_of_row, row_of_kind[:kinds].copy()


union: Callable[..., tuple[Ints, Ints, Ints, Ints]] = kept(_union)
distinct: Callable[[Ints], tuple[Ints, Ints]] = kept(_distinct)
routed: Callable[..., tuple[Ints, Ints]] = kept(_routed)
SOURCES = digest([contribution])
union_on = _enclosing(SOURCES)
