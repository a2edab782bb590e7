"""Small route traces as BigMoeOnEdge writes them, from routing that tests make up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

HEAD = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
Token = Sequence[Sequence[int]]  # [layers][k]: expert ids, or none where there is no record


def write_log(
    path: Path,
    prompt: Sequence[Token],
    decoded: Sequence[Token],
    sizes: Sequence[int],
    n_experts: int,
    *,
    turn: int = 0,
    model: str = "/data/local tmp/toy-Q4.gguf",
    arch: str = "toy",
    append: bool = False,
) -> Path:
    """Write a turn's log; weights fall with the slot, residency and bytes are of an empty cache."""
    k = max(len(layer) for token in (*prompt, *decoded) for layer in token)
    lines = [
        "# route_trace v1",
        f"# model={model} arch={arch} n_layer={len(sizes)} n_expert={n_experts} n_expert_used={k}",
        *(f"# layer={n} expert_bytes={size} dense_bytes=7" for n, size in enumerate(sizes)),
        HEAD,
    ]
    rows = lines if not append else []
    for layer in range(len(sizes)):  # the engine writes a prompt layer by layer
        for step, token in enumerate(prompt):
            rows += _rows(turn, 0, step, layer, token[layer], sizes[layer])
    for step, token in enumerate(decoded, len(prompt)):
        for layer in range(len(sizes)):
            rows += _rows(turn, 1, step, layer, token[layer], sizes[layer])
    before = path.read_text() if append else ""
    path.write_text(before + "\n".join(rows) + "\n")
    return path


def _rows(turn: int, phase: int, step: int, layer: int, ids: Sequence[int], size: int) -> list[str]:
    return [
        f"{turn},{phase},{step},{layer},{slot},{expert},{0.5 / (slot + 1):.6g},0,{size}"
        for slot, expert in enumerate(ids)
    ]


def random_routing(
    seed: int, tokens: int, layers: int, n_experts: int, k: int, *, pruned: bool = False
) -> list[list[list[int]]]:
    """Return routing that favours low ids; pruned: only the last token has the last layer."""
    rng = np.random.default_rng(seed)
    odds = 1 / np.arange(1, n_experts + 1)
    routed = [
        [
            rng.choice(n_experts, k, replace=False, p=odds / odds.sum()).tolist()
            for _ in range(layers)
        ]
        for _ in range(tokens)
    ]
    if pruned:
        for token in routed[:-1]:
            token[-1] = []
    return routed
