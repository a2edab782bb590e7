"""Synthetic top-2 traces drawn from per-layer statistics of a real model's routing.

Each layer keeps two statistics at once: how often each pair of experts is routed to, and how many
experts a token has in common with the one before. Layers are drawn independently of each other, so
any dependence between layers of the real model is lost, and so are topics, by which real sequences
differ.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.trace import Header, RoutingTrace
from crisp.trace.chains import Floats, PairChain

_DRAW = 256  # steps, or rows, drawn together
_LIMIT = 1 << 27  # entries of all chains: 1 GiB


def synthesize(
    chains: dict[int, PairChain],
    tokens: int,
    seed: int,
    *,
    sequences: int = 1,
    note: str | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> RoutingTrace:
    """Draw a trace of ``tokens`` decode rows in ``sequences`` sequences of (nearly) equal length.

    ``chains`` has the chain of each MoE layer; layers below the last that have none are not MoE.
    Every sequence starts from the long-run shares. The same seed gives the same tensors.
    """
    if not 1 <= sequences <= tokens:
        raise CrispError(
            f"{sequences} sequences of {tokens} tokens; at least 1 token each expected"
        )
    if seed < 0:
        raise CrispError(f"seed {seed} found; expected a number that is not negative")
    if sum(len(chain.pairs) ** 2 for chain in chains.values()) > _LIMIT:
        raise CrispError("too many different pairs of experts to draw from")
    lengths = tokens // sequences + (np.arange(sequences) < tokens % sequences)
    sequence = np.repeat(np.arange(sequences), lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    walk, choose = (np.random.default_rng([seed, use]) for use in (0, 1))
    states = _walk(list(chains.values()), walk, int(lengths.max()), sequences, progress)

    pairs = np.concatenate([chain.pairs for chain in chains.values()])  # [states, 2]
    first = np.concatenate([chain.first for chain in chains.values()])  # [states]
    layers = list(chains)
    experts = np.full((tokens, max(layers) + 1, 2), -1, np.int16)
    for start in range(0, tokens, _DRAW):
        rows = slice(start, start + _DRAW)
        state = states[position[rows], :, sequence[rows]]  # [rows, MoE layers]
        chosen = pairs[state]
        swap = choose.random(state.shape) >= first[state]
        experts[rows, layers] = np.where(swap[..., None], chosen[..., ::-1], chosen)
    return RoutingTrace(
        experts=experts,
        sequence=sequence.astype(np.int32),
        position=position.astype(np.int32),
        phase=np.ones(tokens, np.uint8),
        header=Header(
            n_experts=1 + int(pairs.max()),
            top_k=2,
            ordered=True,
            origin="synthetic",
            seed=seed,
            note=note,
        ),
    )


def _walk(
    chains: list[PairChain],
    random: np.random.Generator,
    steps: int,
    walkers: int,
    progress: Callable[[float], None],
) -> npt.NDArray[np.int32]:
    """Return the states of independent walks [steps, layers, walkers], numbered over all layers.

    All layers and walkers take a step in one search: the running sums of each state's transitions,
    plus the state's number, end to end, are one rising line in which state + draw is looked up.
    """
    sizes = np.array([len(chain.pairs) for chain in chains])
    base = np.repeat(np.cumsum(sizes) - sizes, sizes)  # [states]: first state of the state's layer
    width = np.repeat(sizes, sizes)
    begin = np.cumsum(width) - width  # [states]: where the line of a state begins
    first = _rising_line([chain.share[None] for chain in chains])
    line = _rising_line([chain.flow for chain in chains])
    states = np.empty((steps, len(chains), walkers), np.int32)
    state = np.empty(0, np.int64)
    for start in range(0, steps, _DRAW):
        draws = 1 - random.random((min(_DRAW, steps - start), len(chains), walkers))  # (0, 1]
        for step, draw in enumerate(draws, start):
            if step == 0:
                state = np.searchsorted(first, np.arange(len(chains))[:, None] + draw)
            else:
                place = np.searchsorted(line, state + draw)
                # A sum may round down to the state's number itself, the end of the line before.
                state = base[state] + np.maximum(place - begin[state], 0)
            states[step] = state
        progress(min(1.0, (start + _DRAW) / steps))
    return states


def _rising_line(rows: list[Floats]) -> Floats:
    """Return each row's running sums as shares of its total, plus the row's number, end to end."""
    parts, number = [], 0
    for matrix in rows:
        sums = matrix.cumsum(axis=1)
        numbers = np.arange(number, number + len(matrix))[:, None]
        parts.append((sums / sums[:, -1:] + numbers).ravel())
        number += len(matrix)
    return np.concatenate(parts)
