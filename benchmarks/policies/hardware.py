"""Policies on this machine: tokens/s beside bytes a token, by turns, paced and from the free disk.

Two stores of more than 2 GB have random weights in the sizes of a larger model: layers and experts
are as many as the small model has, so its routing, router weights, contributions and sensitivities
are those of the run (an expert's contribution spread evenly over the blocks of the larger one).
Beside them the small models themselves write text.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from crisp.hw.calibration.tables import processor_name
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.replay import replay
from crisp.hw.store.packing import pack_synthetic
from crisp.hw.store.reader import Store
from crisp.model.spec import ModelSpec
from crisp.profile import Profile
from crisp.run.case import Case
from crisp.run.setup import load_setup

Row = dict[str, Any]
Tell = Callable[[str], None]
BUDGETS = ("10%", "20%")
FAMILIES = ("lru", "crisp", "contribution-resident", "saliency")
MODES = {"paced": 500_000_000, "free": None}  # bytes a second of the link
WRITING = {"paced": 20_000_000, "free": None}  # of the small models
REPEATS, TOKENS, WRITTEN = 3, 16, 60
WRITING_BUDGETS = ("20%",)
SIZES = {
    "tiny-mixtral": ModelSpec.from_config({
        "model_type": "mixtral", "hidden_size": 2048, "intermediate_size": 3584,
        "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2, "dtype": "bfloat16",
    }, "8 experts of 44 MB"),
    "tiny-deepseek": ModelSpec.from_config({
        "model_type": "deepseek", "hidden_size": 2048, "intermediate_size": 2048,
        "moe_intermediate_size": 1408, "num_hidden_layers": 5, "first_k_dense_replace": 1,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 32,
        "n_shared_experts": 0, "num_experts_per_tok": 4, "dtype": "bfloat16",
    }, "32 experts of 17 MB"),
}  # fmt: skip
PARTS = ("stall_ms_per_token", "compute_ms_per_token", "layer_ms_per_token",
         "queue_us_per_token", "lookup_us_per_token", "coordination_us_per_token")  # fmt: skip


def conditions() -> Row:
    """Return what the figures were measured on."""
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "tokens": TOKENS,
        "written": WRITTEN,
        "repeats": REPEATS,
        "paced": MODES["paced"],
        "paced_writing": WRITING["paced"],
    }


def replayed(
    name: str, profile: Profile, chosen: dict[str, dict[str, Any]], folder: Path, tell: Tell
) -> list[Row]:
    """Replay the routing of a small model with a store of more than 2 GB.

    chosen: by budget, the policy of each family.
    """
    store = pack_synthetic(SIZES[name], folder / f"store-{name}")
    return _by_turns(
        [
            (mode, budget, family)
            for mode in MODES
            for budget in BUDGETS
            for family in FAMILIES
            if family in chosen[budget]
        ],
        lambda mode, budget, family: _replay(
            store, name, profile, budget, chosen[budget][family], MODES[mode]
        ),
        lambda row: tell(f"{name}, replay: {row}"),
    )


def _replay(
    store: Store, name: str, profile: Profile, budget: str, policy: Any, limit: int | None
) -> Any:
    setup = load_setup(f"{name}-docs", model=store.spec)
    case: Case = replace(setup.case(policy, budget, limit=TOKENS), profile=profile)
    return replay(case, store, DeviceOptions(link_limit=limit)).metrics


def written(
    name: str, prepared: Path, chosen: dict[str, dict[str, Any]], folder: Path, tell: Tell
) -> list[Row]:
    """Let a small, prepared model write text."""
    store = folder / f"small-{name}"
    _crisp("pack", prepared, "--out", store)

    def write(mode: str, budget: str, family: str) -> Any:
        parts = chosen[budget][family].to_dict()
        options = [
            f"--{part}={parts[part]}"
            for part in ("width", "order", "cache", "unit", "prefetch", "rescale")
            if part in parts
        ]
        limit = WRITING[mode]
        if limit is not None:
            options.append(f"--link-limit={limit}B/s")
        file = folder / "run.json"
        _crisp(
            "generate", prepared, "--store", store, "--policy", parts["name"], "--budget", budget,
            "--prompt", "The first of all rules", "--max-new-tokens", WRITTEN, "--json", file,
            *options,
        )  # fmt: skip
        return json.loads(file.read_text(encoding="utf-8"))["metrics"]

    return _by_turns(
        [
            (mode, budget, family)
            for mode in WRITING
            for budget in WRITING_BUDGETS
            for family in FAMILIES
            if family in chosen[budget]
        ],
        write,
        lambda row: tell(f"{name}, writing: {row}"),
    )


def _of_decoding(metrics: dict[str, Any], part: str) -> float | None:
    """Return what a decoded token takes; the host's times are of all tokens."""
    value: float | None = metrics.get(f"decode_{part}", metrics[part])
    return value


def _by_turns(
    cells: Sequence[tuple[str, str, str]],
    run: Callable[[str, str, str], Any],
    tell: Callable[[str], None],
) -> list[Row]:
    """Run every cell once in each round, in an order of its own; return medians over the rounds."""
    draw, found = random.Random(0), dict[tuple[str, str, str], list[Any]]()
    for _ in range(REPEATS):
        for cell in draw.sample(cells, len(cells)):
            metrics = run(*cell)
            found.setdefault(cell, []).append(metrics)
            tell(f"{' '.join(cell)}: {metrics['tokens_per_second']:.2f} tokens/s")
    return [
        {"mode": mode, "budget": budget, "family": family}
        | {
            part: median(_of_decoding(one, part) or 0 for one in found[mode, budget, family])
            for part in ("tokens_per_second", "bytes_per_token", *PARTS)
        }
        | {"runs": [one["tokens_per_second"] for one in found[mode, budget, family]]}
        for mode, budget, family in cells
    ]


def prepare(model: Path, texts: Sequence[Path], out: Path) -> None:
    """Prepare a small model in the blocks that policies were chosen in."""
    _crisp("prepare", model, "--text", *texts, "--block", 16, "--window", 256, "--out", out)


def _crisp(*words: object) -> None:
    """Run a command of crisp's, and end where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "crisp", *map(str, words)], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
