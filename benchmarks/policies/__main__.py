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
import tempfile
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
    parser.add_argument(
        "--hardware", action="store_true", help="only measure on this machine what was chosen"
    )
    parser.add_argument(
        "--prefetching", action="store_true", help="only simulate prefetchers for what was chosen"
    )
    parser.add_argument(
        "--additions", action="store_true", help="only measure additions to policy saliency"
    )
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
        if arguments.hardware:
            content = json.loads((ROOT / CONTENT).read_text(encoding="utf-8"))
            write(ROOT, content | {"hardware": measure_all(arguments, content)})
            return
        if arguments.prefetching:
            content = json.loads((ROOT / CONTENT).read_text(encoding="utf-8"))
            write(ROOT, content | {"models": prefetch_all(arguments, content["models"])})
            return
        if arguments.additions:
            content = json.loads((ROOT / CONTENT).read_text(encoding="utf-8"))
            write(ROOT, content | {"additions": add_all(arguments)})
            return
        content = read_all(arguments)
        if arguments.budget is None:
            content["hardware"] = measure_all(arguments, content)
            content["additions"] = add_all(arguments)
    except CrispError as error:
        parser.exit(2, f"error: {error}\n")
    if arguments.budget is None:
        write(ROOT, content)
        shutil.rmtree(arguments.work)


def read_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read everything of the page."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are too small for more
    from benchmarks.policies.choosing import BUDGETS, SALIENCY, policies_at, results
    from benchmarks.policies.prefetching import simulate
    from benchmarks.policies.reading import Bench
    from benchmarks.policies.real import measure
    from benchmarks.quality.estimates import rounded

    models = []
    for name in arguments.model:

        def tell(what: str, name: str = name) -> None:
            print(f"{name}: {what}", file=sys.stderr, flush=True)

        bench = Bench(ROOT / "traces" / name, arguments.data, arguments.work, tell)
        model = results(bench, arguments.budget or BUDGETS)
        chosen = [(at["budget"], policies_at(at)[SALIENCY]) for at in model["budgets"]]
        models.append(model | {"prefetching": simulate(name, bench.profile, chosen)})
    with tempfile.TemporaryDirectory() as folder:
        real = measure(arguments.data, Path(folder), tell_plainly)
    content: dict[str, Any] = rounded({"models": models, "real": real})
    return content


def prefetch_all(
    arguments: argparse.Namespace, models: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the models with prefetchers simulated anew for the policies that were chosen."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from benchmarks.policies.choosing import SALIENCY, policies_at
    from benchmarks.policies.prefetching import simulate
    from benchmarks.policies.reading import Bench
    from benchmarks.quality.estimates import rounded

    found = []
    for model in models:
        name = model["facts"]["name"]
        bench = Bench(ROOT / "traces" / name, arguments.data, arguments.work, tell_plainly)
        chosen = [(at["budget"], policies_at(at)[SALIENCY]) for at in model["budgets"]]
        found.append(model | {"prefetching": rounded(simulate(name, bench.profile, chosen))})
    return found


def add_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure what additions to the policy saliency gain, model by model."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from benchmarks.policies.additions import measure
    from benchmarks.policies.reading import Bench
    from benchmarks.quality.estimates import rounded

    found: list[dict[str, Any]] = []
    for name in arguments.model:
        bench = Bench(ROOT / "traces" / name, arguments.data, arguments.work, tell_plainly)
        found.append(measure(bench))
    additions: list[dict[str, Any]] = rounded(found)
    return additions


def tell_plainly(what: str) -> None:
    """Say how far it has come."""
    print(what, file=sys.stderr, flush=True)


def measure_all(arguments: argparse.Namespace, content: dict[str, Any]) -> dict[str, Any]:
    """Measure on this machine the policies that were chosen."""
    from benchmarks.policies import hardware
    from benchmarks.policies.choosing import policies_at
    from benchmarks.quality.estimates import rounded
    from benchmarks.quality.setting import KINDS
    from crisp.profile.metadata import FILE, Metadata

    models = []
    arguments.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.work.parent) as folder:
        for model in content["models"]:
            name, work = model["facts"]["name"], Path(folder)
            prepared = work / f"prepared-{name}"
            texts = [arguments.data / "data" / f"{kind}.calibration.txt" for kind in KINDS.values()]
            hardware.prepare(ROOT / "traces" / name, texts, prepared)
            profile = Metadata.load(prepared / FILE).profile()
            chosen = {at["budget"]: policies_at(at) for at in model["budgets"]}
            models.append(
                {
                    "name": name,
                    "replayed": hardware.replayed(name, profile, chosen, work, tell_plainly),
                    "written": hardware.written(name, prepared, chosen, work, tell_plainly),
                }
            )
    measured: dict[str, Any] = rounded({"conditions": hardware.conditions(), "models": models})
    return measured


if __name__ == "__main__":
    main()
