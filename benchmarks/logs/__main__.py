"""An engine's published figures from its own logs, and the diagnosis of those logs.

    python benchmarks/logs --data DIR

writes docs/logs.md and docs/logs.json (every figure). DIR/logs holds the logs. Two minutes on one
core.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # not this folder: its modules have plain names


def main() -> None:
    """Recompute all figures, and write the page."""
    parser = argparse.ArgumentParser(prog="benchmarks/logs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, help="the folder with logs/")
    parser.add_argument("--render", action="store_true", help="only write the page anew")
    arguments = parser.parse_args()
    from benchmarks.logs.page import CONTENT, write

    if arguments.render:
        write(ROOT, json.loads((ROOT / CONTENT).read_text(encoding="utf-8")))
        return
    if arguments.data is None:
        parser.error("--data DIR: the folder with logs/ is needed")
    from crisp.errors import CrispError

    try:
        write(ROOT, content_of(arguments.data))
    except CrispError as error:
        parser.exit(2, f"error: {error}\n")


def content_of(data: Path) -> dict[str, Any]:
    """Return all figures of the page."""
    from benchmarks.logs.diagnoses import diagnoses
    from benchmarks.logs.imports import imports
    from benchmarks.logs.reproduction import reproduce

    return {
        "version": 1,
        "imports": imports(data),
        "models": reproduce(data),
        "diagnoses": diagnoses(data),
    }


if __name__ == "__main__":
    main()
