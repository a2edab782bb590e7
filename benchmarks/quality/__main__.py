"""What widths cost in quality, measured on the small models of this project.

    python benchmarks/quality --data DIR

writes docs/quality.json (every figure), docs/quality.md and docs/images/quality-*.png. DIR/data
holds {code,docs,kjv}.{calibration,heldout}.txt. It takes some five minutes of processor time a
model. What is measured is kept in the work folder until the page is written, so that a run that was
stopped goes on where it was.
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

from crisp.errors import CrispError  # noqa: E402

MODELS = ("tiny-mixtral", "tiny-deepseek")


def main() -> None:
    """Measure the requested experiments; with everything measured, write the page."""
    parser = argparse.ArgumentParser(prog="benchmarks/quality", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, help="the folder with data/KIND.PART.txt")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "quality")
    available = [name for name in MODELS if (ROOT / "traces" / name).is_dir()]
    parser.add_argument("--model", nargs="+", default=available, help="of traces/")
    parser.add_argument("--only", nargs="*", help="experiments to measure; no page is written")
    parser.add_argument("--keep", action="store_true", help="keep the work folder")
    parser.add_argument("--render", action="store_true", help="only write the page anew")
    arguments = parser.parse_args()
    if not arguments.render:
        if arguments.data is None:
            parser.error("--data DIR: the folder of texts is needed")
        try:
            measured = measure(arguments)
        except CrispError as error:
            parser.exit(2, f"error: {error}\n")
        if arguments.only is not None:
            return
        from benchmarks.quality.page.page import write

        write(ROOT, measured)
        if not arguments.keep:
            shutil.rmtree(arguments.work)
        return
    from benchmarks.quality.page.page import CONTENT, write

    write(ROOT, json.loads((ROOT / CONTENT).read_text(encoding="utf-8")))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all experiments of all models, as docs/quality.json has them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are too small for more
    from benchmarks.quality.estimates import rounded
    from benchmarks.quality.experiments import EXPERIMENTS
    from benchmarks.quality.setting import Amounts
    from benchmarks.quality.study import Study
    from crisp.files import atomic

    models = []
    for name in arguments.model:

        def tell(what: str, name: str = name) -> None:
            print(f"{name}: {what}", file=sys.stderr, flush=True)

        study = Study(ROOT / "traces" / name, arguments.data, arguments.work, Amounts(), tell)
        results = {}
        for title, experiment in EXPERIMENTS.items():
            if arguments.only and title not in arguments.only:
                continue
            file = study.work / f"{title}.json"
            if not file.exists():
                tell(f"-- {title}")
                with atomic(file) as temporary:
                    temporary.write_text(json.dumps(rounded(experiment(study))))
            results[title] = json.loads(file.read_text())
        models.append({**study.facts(), "experiments": results})
    return {"version": 1, "models": models}


if __name__ == "__main__":
    main()
