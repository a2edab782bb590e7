"""Which policy loads the fewest bytes at which loss, budget by budget, on the small models.

    python benchmarks/policies --data DIR

writes docs/policies.md, docs/policies.json (every reading) and docs/images/policies-*.png. DIR/data
holds {code,docs,kjv}.{calibration,heldout}.txt. What has been read is kept in the work folder until
the page is written, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # not this folder: its modules have plain names

MODELS = ("tiny-mixtral", "tiny-deepseek")


def main() -> None:
    """Read all policies, and write the page."""
    parser = argparse.ArgumentParser(prog="benchmarks/policies", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, help="the folder with data/KIND.PART.txt")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "policies")
    parser.add_argument("--model", nargs="+", default=MODELS, help="of traces/")
    parser.add_argument("--budget", nargs="+", help="read for these only; no page is written")
    parser.add_argument("--render", action="store_true", help="only write the page anew")
    arguments = parser.parse_args()
    from benchmarks.policies.page import CONTENT, write

    if arguments.render:
        write(ROOT, json.loads((ROOT / CONTENT).read_text(encoding="utf-8")))
        return
    if arguments.data is None:
        parser.error("--data DIR: the folder of texts is needed")
    from crisp.errors import CrispError

    try:
        content = read_all(arguments)
    except CrispError as error:
        parser.exit(2, f"error: {error}\n")
    if arguments.budget is None:
        write(ROOT, content)
        shutil.rmtree(arguments.work)


def read_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read everything of the page."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are too small for more
    from benchmarks.policies.choosing import BUDGETS, results
    from benchmarks.policies.reading import Bench
    from benchmarks.quality.estimates import rounded

    models = []
    for name in arguments.model:

        def tell(what: str, name: str = name) -> None:
            print(f"{name}: {what}", file=sys.stderr, flush=True)

        bench = Bench(ROOT / "traces" / name, arguments.data, arguments.work, tell)
        models.append(results(bench, arguments.budget or BUDGETS))
    content: dict[str, Any] = rounded({"models": models})
    return content


if __name__ == "__main__":
    main()
