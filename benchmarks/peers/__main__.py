"""Tokens a second of CRISP, llama.cpp and accelerate, all under the same memory caps.

    python benchmarks/peers

as root (memory cgroups), on a quiet machine, writes docs/peers.json (every run), docs/peers.md and
docs/images/peers.png, in some twenty minutes. Every contestant runs the same random weights, alone,
from cold caches, in a group whose cap counts the page cache. The models take 13 GB of --folder.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # not this folder: its modules have plain names

from benchmarks.peers.cgroup import Group, NoGroup, group  # noqa: E402
from benchmarks.peers.page import CONTENT, write  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.hw.calibration.tables import processor_name  # noqa: E402

PACKAGES = ("torch", "transformers", "accelerate", "xllamacpp", "numba")
FORMATS = ("bf16", "int4")


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(prog="benchmarks/peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--layers", type=int, default=20, help="of the model, where it is made")
    parser.add_argument("--tokens", type=int, default=48, help="of a run, at most")
    parser.add_argument("--seconds", type=float, default=4, help="of a run's decoding, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--format", choices=FORMATS, action="append", help="only this one")
    parser.add_argument("--folder", type=Path, help="to keep the models in, or where they are")
    parser.add_argument("--out", type=Path, default=ROOT, help="where docs/ is")
    parser.add_argument("--page-only", action="store_true", help="only write the page anew")
    settings = parser.parse_args()
    if settings.page_only:
        write(settings.out, json.loads((settings.out / CONTENT).read_text(encoding="utf-8")))
        return 0
    with tempfile.TemporaryDirectory(dir=ROOT) as scratch:
        folder = (settings.folder or Path(scratch)).resolve()
        try:
            with group() as own:
                write(settings.out, measured(own, folder, settings))
        except (NoGroup, CrispError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def measured(own: Group, folder: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """Run all contestants at all caps; return the content of docs/peers.json."""
    from benchmarks.peers.measure import Bench, instruction_sets, measure

    if not (folder / "made").exists():
        prepare(folder, settings.layers)
    layers = json.loads((folder / "model" / "config.json").read_text("utf-8"))["num_hidden_layers"]
    formats = tuple(settings.format or FORMATS)
    records = measure(Bench(own, folder, settings, say), formats)
    runs = [run for record in records.values() for run in record["runs"]]
    built_for = next((run.pop("built_for") for run in runs if "built_for" in run), "")
    for run in runs:
        run.pop("built_for", None)
    conditions = {
        "date": datetime.date.today().isoformat(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "threads": settings.threads,
        "layers": layers,
        "tokens": settings.tokens,
        "seconds": settings.seconds,
        "repeats": settings.repeats,
        "cgroup": own.version,
        "built_for": instruction_sets(built_for),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    return {"conditions": conditions, "formats": records}


def prepare(folder: Path, layers: int) -> None:
    """Make the checkpoint, and the same in both formats as GGUF and as a store."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CrispError(f"{folder}: has no models of a run before, expected an empty folder")
    model = folder / "model"
    pack = ("crisp", "pack", model, "--dtype")
    for arguments in (
        ("benchmarks.peers.model", model, layers),
        ("benchmarks.peers.to_gguf", model, folder / "bf16.gguf", "BF16"),
        ("benchmarks.peers.to_gguf", model, folder / "int4.gguf", "Q4_0"),
        (*pack, "bf16", "--out", folder / "bf16-store"),
        (*pack, "int4", "--out", folder / "int4-store"),
    ):
        say(" ".join(str(part) for part in arguments))
        command = [sys.executable, "-m", *map(str, arguments)]
        subprocess.run(command, check=True, stdout=sys.stderr, cwd=ROOT)
    (folder / "made").touch()


_BEGUN = time.monotonic()


def say(text: str) -> None:
    """Report progress, with the seconds since the start."""
    print(f"[{time.monotonic() - _BEGUN:5.0f} s] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
