"""What is settled before a run, recomputed plainly: split, counts, tiers, widths, capacity, costs.

Imports nothing of crisp, sim or hw. The rules stand in the functions' docstrings.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

Key = tuple[int, int]  # (layer, expert)
HOT, WARM, COLD = 0, 1, 2


def split(sequence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row indices (profile, rest): the first floor(n/2) sequences by ascending id and the others;
    of a single sequence the first floor(rows/2) rows and the others."""
    ids = sorted(set(np.asarray(sequence).tolist()))
    rows = np.arange(len(sequence))
    if len(ids) == 1:
        return rows[: len(rows) // 2], rows[len(rows) // 2 :]
    first = np.isin(sequence, ids[: len(ids) // 2])
    return rows[first], rows[~first]


def expert_counts(experts: np.ndarray, n_experts: int) -> np.ndarray:
    """[layers, n_experts]: how many rows chose each expert."""
    counts = np.zeros((experts.shape[1], n_experts), np.int64)
    for layer in range(experts.shape[1]):
        for expert in experts[:, layer].ravel().tolist():
            if expert >= 0:
                counts[layer, expert] += 1
    return counts


def anchor_rank(chosen: Sequence[int], counts: Sequence[int] | None) -> int | None:
    """Rank of the anchor among one row's experts of one layer: the first that is present, or,
    if the experts are not ordered by weight, the most frequent (`counts`; ties: lowest id)."""
    present = [rank for rank, expert in enumerate(chosen) if expert >= 0]
    if not present:
        return None
    if counts is None:
        return present[0]
    return min(present, key=lambda rank: (-counts[chosen[rank]], chosen[rank]))


def pair_counts(experts: np.ndarray, n_experts: int, ordered: bool = True) -> np.ndarray:
    """[layers, E, E]: at (i, j), i < j, how often a row's anchor met another of its experts.
    For top-2 these are the combinations themselves."""
    by_layer = None if ordered else expert_counts(experts, n_experts).tolist()
    pairs = np.zeros((experts.shape[1], n_experts, n_experts), np.int64)
    for row in experts.tolist():
        for layer, chosen in enumerate(row):
            rank = anchor_rank(chosen, by_layer[layer] if by_layer else None)
            for other, expert in enumerate(chosen):
                if rank is not None and other != rank and expert >= 0:
                    i, j = sorted((chosen[rank], expert))
                    pairs[layer, i, j] += 1
    return pairs


def tiers(
    pairs: np.ndarray, alpha: Fraction = Fraction(6, 10), beta: Fraction = Fraction(9, 10)
) -> np.ndarray:
    """[layers, E, E] of HOT, WARM, COLD, symmetric: by count descending, ties by (i, j); HOT while
    the share of the combinations before is < alpha, WARM while < beta; unseen ones are COLD."""
    result = np.full(pairs.shape, COLD, np.uint8)
    for layer in range(pairs.shape[0]):
        seen = [(-int(pairs[layer, i, j]), int(i), int(j)) for i, j in np.argwhere(pairs[layer])]
        total = -sum(count for count, _, _ in seen)
        before = 0
        for count, i, j in sorted(seen):
            share = Fraction(before, total)
            tier = HOT if share < alpha else WARM if share < beta else COLD
            result[layer, i, j] = result[layer, j, i] = tier
            before -= count
    return result


def blocks_of(share: Fraction, d_ff: int, block: int) -> int:
    """A share of the d_ff neurons in whole blocks, rounded up."""
    return -((-share * d_ff) // block)


def widths_full(experts: np.ndarray, n_blocks: int) -> np.ndarray:
    """[rows, layers, k] blocks; also uniform(r), called with the blocks of r."""
    return np.where(experts >= 0, n_blocks, 0)


def widths_tiered(
    experts: np.ndarray,
    n_blocks: int,
    tier: np.ndarray,
    warm: int,
    cold: int = 0,
    counts: np.ndarray | None = None,
) -> np.ndarray:
    """[rows, layers, k] blocks: the anchor is full, another expert takes the width of the tier of
    its pair with the anchor. `counts` (of the profile) only if experts are not ordered."""
    of_tier = {HOT: n_blocks, WARM: warm, COLD: cold}
    result = np.zeros(experts.shape, np.int64)
    by_tier, by_layer = tier.tolist(), None if counts is None else counts.tolist()
    for r, row in enumerate(experts.tolist()):
        for layer, chosen in enumerate(row):
            anchor = anchor_rank(chosen, by_layer[layer] if by_layer else None)
            for rank, expert in enumerate(chosen):
                if expert >= 0:
                    pair = by_tier[layer][chosen[anchor]][expert]
                    result[r, layer, rank] = n_blocks if rank == anchor else of_tier[pair]
    return result


def widths_single(
    experts: np.ndarray, n_blocks: int, counts: np.ndarray | None = None
) -> np.ndarray:
    """[rows, layers, k] blocks: the anchor is full, the others are skipped."""
    n_experts = int(experts.max()) + 1
    tier = np.full((experts.shape[1], n_experts, n_experts), COLD)
    return widths_tiered(experts, n_blocks, tier, 0, 0, counts)


# ---------------------------------------------------------------------------- capacity and costs


def capacities(
    share: Fraction, n_moe: int, n_experts: int, n_blocks: int, scope: str, unit: str
) -> list[int]:
    """Blocks of each pool: one pool a MoE layer (scope layer) or a single one (global)."""
    blocks = {"expert": n_blocks, "block": 1}[unit]
    units = share * n_moe * n_experts * n_blocks // blocks
    if scope == "global":
        return [units * blocks]
    each, over = divmod(units, n_moe)
    return [(each + (index < over)) * blocks for index in range(n_moe)]


def static_set(
    counts: np.ndarray,
    moe_layers: Sequence[int],
    share: Fraction,
    n_blocks: int,
    scope: str,
    unit: str,
) -> dict[Key, int]:
    """{(layer, expert): blocks} of the profile's most frequent experts (ties: lowest layer, id)."""
    n_experts = counts.shape[1]
    rooms = capacities(share, len(moe_layers), n_experts, n_blocks, scope, unit)
    pools = [list(moe_layers)] if scope == "global" else [[layer] for layer in moe_layers]
    resident: dict[Key, int] = {}
    for room, pool in zip(rooms, pools, strict=True):
        keys = [(layer, expert) for layer in pool for expert in range(n_experts)]
        for key in sorted(keys, key=lambda key: (-counts[key], key)):
            if room > 0:
                resident[key] = min(n_blocks, room)
                room -= resident[key]
    return resident


def half_up(value: Fraction) -> int:
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)


def table_costs(
    load_expert_ns: int, compute_expert_ns: int, layer_ns: int, n_blocks: int
) -> dict[str, Callable[..., int]]:
    """load_ns, compute_ns and layer_ns of `simulate`: linear in blocks, rows do not matter."""
    load = [half_up(Fraction(load_expert_ns * n, n_blocks)) for n in range(n_blocks + 1)]
    compute = [half_up(Fraction(compute_expert_ns * n, n_blocks)) for n in range(n_blocks + 1)]
    return {
        "load_ns": lambda blocks: load[blocks],
        "compute_ns": lambda first, last, row_widths: compute[last - first],
        "layer_ns": lambda layer, rows: layer_ns,
    }
