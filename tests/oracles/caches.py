"""What a cache that knows the future can reach, by trying everything. Small cases only.

Imports nothing of crisp, sim or hw.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import product

import numpy as np


def fewest_loads(events: Sequence[dict[int, int]], n_experts: int, room: int, whole: bool) -> int:
    """The fewest blocks that any cache of one layer loads. events: {expert: blocks asked for}.

    Between two events it may hold any prefix of what was there or was just used (whole: all of that
    or nothing), ``room`` blocks in all.
    """
    states = {(0,) * n_experts: 0}  # blocks held of each expert -> fewest loads so far
    for asked in events:
        after: dict[tuple[int, ...], int] = {}
        for state, before in states.items():
            loads = before + sum(max(0, width - state[e]) for e, width in asked.items())
            most = [max(blocks, asked.get(e, 0)) for e, blocks in enumerate(state)]
            for kept in product(*({0, m} if whole else range(m + 1) for m in most)):
                if sum(kept) <= room:
                    after[kept] = min(loads, after.get(kept, loads))
        states = after
    return min(states.values())


def forced_belady(accesses: Sequence[int], room: int) -> int:
    """Misses of Belady's rule, one access at a time, everything admitted: farthest use leaves."""
    held: set[int] = set()
    misses = 0
    for now, expert in enumerate(accesses):
        if expert in held:
            continue
        misses += 1
        if len(held) == room:
            rest = list(accesses[now + 1 :])
            held.remove(max(held, key=lambda e: rest.index(e) if e in rest else len(rest)))
        held.add(expert)
    return misses


def usual_next(
    experts: np.ndarray, layer: int, after: int, anchor: Sequence[int | None]
) -> dict[tuple[int, int], list[int]]:
    """{combination in ``layer``: its k most frequent experts in ``after``}; ties: the lower id.

    experts [rows, layers, k]; anchor: rank of each row's anchor in ``layer``. A combination is the
    anchor with the first other expert, or with itself where there is none.
    """
    seen: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for row, rank in zip(experts.tolist(), anchor, strict=True):
        if rank is None:
            continue
        first = row[layer][rank]
        others = [e for e in row[layer] if e >= 0 and e != first]
        i, j = sorted((first, others[0] if others else first))
        seen[i, j].update(e for e in row[after] if e >= 0)
    k = experts.shape[2]
    return {
        pair: sorted(counts, key=lambda e: (-counts[e], e))[:k] for pair, counts in seen.items()
    }
