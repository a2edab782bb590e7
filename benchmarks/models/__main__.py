"""Try every command on a tiny random model of every family, and write docs/models.md's table.

Run it with `make models`; it takes some minutes on two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.models.every import try_all  # noqa: E402
from benchmarks.models.page import PAGE, insert, render  # noqa: E402
from benchmarks.models.tiny import model_types  # noqa: E402


def main() -> None:
    """Write the table."""
    path = ROOT / PAGE
    trials = try_all(model_types(), report=lambda trial: print(trial.model_type, flush=True))
    before = path.read_text(encoding="utf-8") if path.exists() else "# Models\n"
    path.write_text(insert(before, render(trials)), encoding="utf-8")
    print(f"{PAGE}: {sum(trial.complete for trial in trials)} of {len(trials)} families complete")


if __name__ == "__main__":
    main()
