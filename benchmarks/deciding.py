"""Time the host's decisions, at the counts of Mixtral, DeepSeek-MoE and Qwen3-30B-A3B.

Run it with `make bench`. Layers, experts, top-k and blocks are the models', the matrices tiny: 16
neurons a block, 64 numbers each. The paper's figures (Table 3: tier lookup, priority queue
operations, stream coordination) are of its own program beside a GPU, and printed unchanged. The
lookup of a replay is the host's; the lookup on a device needs a model.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from crisp.hw.devices.options import DeviceOptions
from crisp.hw.replay import replay
from crisp.hw.store.packing import pack_synthetic
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.run.case import Case, Conditions
from crisp.trace import Header, RoutingTrace

TOKENS, BLOCKS = 60, 8
PAPER = {"mixtral-8x7b": (0.8, 2.3, 45.0), "deepseek-moe-16b": (1.2, 4.7, 38.0)}  # us a token
MODELS = (*PAPER, "qwen3-30b-a3b")
POLICIES: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("lru", "expert", {}),
    ("lru", "expert", {"cache": "saliency", "unit": "block"}),
    ("crisp", "expert", {}),
    ("crisp", "block", {}),
)
PARTS = ("lookup", "queue", "coordination")


def main() -> None:
    """Print a line for each model, policy and granularity."""
    print(f"{'host, us':32}{'an event':>33}{'a token':>33}{'paper, a token':>24}")
    print(f"{'':32}" + 2 * "".join(f"{part[:10]:>11}" for part in PARTS))
    for model in MODELS:
        spec = small(ModelSpec.named(model))
        trace = routing(spec)
        with tempfile.TemporaryDirectory() as folder:
            store = pack_synthetic(spec, Path(folder) / "store")
            for policy, granularity, changes in POLICIES:
                chosen = named(policy, **changes)
                case = Case(
                    trace, spec, chosen, Budget.parse("25%"), Profile.from_trace(trace),
                    Conditions(granularity),
                )  # fmt: skip
                metrics = replay(case, store, DeviceOptions()).metrics
                columns = [metrics[f"{part}_us_per_{per}"] or 0
                           for per in ("event", "token") for part in PARTS]  # fmt: skip
                figures = "  ".join(f"{figure:6g}" for figure in PAPER.get(model, ()))
                print(
                    f"{model} {changes.get('cache', policy)} {granularity}".ljust(32)
                    + "".join(f"{column:11.1f}" for column in columns)
                    + f"  {figures}"
                )


def small(spec: ModelSpec) -> ModelSpec:
    """Return a model with the same counts, but 16 neurons a block of 64 numbers each."""
    return ModelSpec(
        name=spec.name, n_layers=spec.n_layers, moe_layers=spec.moe_layers,
        n_experts=spec.n_experts, top_k=spec.top_k, d_model=64, d_ff=16 * BLOCKS, dtype_bits=16,
        bits=spec.bits, matrices=3, biases=False, dense_params=spec.dense_params, block=16,
        config_hash=None,
    )  # fmt: skip


def routing(spec: ModelSpec) -> RoutingTrace:
    """Return a trace of independently drawn random experts."""
    draw = np.random.default_rng(0)
    experts = np.full((TOKENS, spec.n_layers, spec.top_k), -1, np.int16)
    for layer in spec.moe_layers:
        experts[:, layer] = draw.random((TOKENS, spec.n_experts)).argsort(1)[:, : spec.top_k]
    return RoutingTrace(
        experts=experts, sequence=np.zeros(TOKENS, np.int32),
        position=np.arange(TOKENS, dtype=np.int32), phase=np.ones(TOKENS, np.uint8),
        header=Header(
            n_experts=spec.n_experts, top_k=spec.top_k, ordered=True, origin="synthetic", seed=0
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
