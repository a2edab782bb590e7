"""Real routing of models whose weights are not at hand: what the cache of saliency does there.

Without weights nobody knows contributions and sensitivities, and so no widths: all run in full, and
the cache goes by router weight, or by frequency alone where there is no weight. gpt-oss-20b's trace
was recorded; of Mixtral 8x7B only counts of pairs and their persistence are published, from which a
trace is drawn.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crisp.run.case import Conditions
from crisp.run.setup import load_setup
from crisp.sim.experiment import run_case
from crisp.sim.hardware import hardware_profile

BUDGETS = ("10%", "20%", "30%", "50%")
CACHES = ("lru", "lfu", "saliency")
TOKENS = 8000
Tell = Callable[[str], None]


def measure(data: Path, folder: Path, tell: Tell) -> list[dict[str, Any]]:
    """Return the blocks that each cache loads a token, at unit block and full width."""
    routing = data / "traces"
    traces = {
        "gpt-oss-20b": ("gpt-oss-20b, recorded", _trace(
            folder / "gpt-oss.trace.safetensors", "import",
            routing / "gpt-oss-20b__mmlu-gpqa-mix.parquet", "--model", "gpt-oss-20b",
        )),
        "mixtral-8x7b": ("Mixtral 8x7B, drawn", _trace(
            folder / "mixtral.trace.safetensors", "synth",
            "--pairs", routing / "mixtral-8x7b-pair-counts.csv",
            "--persistence", routing / "mixtral-8x7b-persistence.csv",
            "--tokens", 2 * TOKENS, "--sequences", 40, "--seed", 0,
        )),
    }  # fmt: skip
    machine, found = hardware_profile("paper-table1"), []
    for model, (label, file) in traces.items():
        setup = load_setup(file, model=model, conditions=Conditions(limit=TOKENS))
        for budget in BUDGETS:
            row: dict[str, Any] = {"trace": label, "budget": budget, "tokens": setup.rows()}
            for cache in CACHES:
                policy = setup.policy("lru", cache=cache, unit="block")
                run = run_case(setup.case(policy, budget), machine, "fast")
                row[cache] = run.metrics["bytes_per_token"]
                row["fewest"] = run.metrics["belady_bytes_per_token"]
            found.append(row)
            tell(f"{label} {budget}: read")
    return found


def _trace(out: Path, *words: object) -> Path:
    """Make a trace by crisp trace."""
    command = [sys.executable, "-m", "crisp", "trace", *map(str, words), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return out
