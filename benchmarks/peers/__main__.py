"""Compare the tokens per second of CRISP, llama.cpp and accelerate under one memory cap.

Run it with `make peers`, as root (memory cgroups), on a quiet machine; it writes docs/peers.md, and
takes ten minutes and 8 GB of disk. Every contestant runs the same random weights, alone, from cold
caches, in a group whose cap counts the page cache. The cap is what the contestant's process takes
without experts, and a share of the experts' bytes.
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
from pathlib import Path
from typing import Any

import model
from cgroup import Group, NoGroup, group
from page import page

from crisp.hw.calibration.tables import processor_name

HERE = Path(__file__).parent
SHARES = (0.2, 0.5, 1.0)
SLACK = 64_000_000  # bytes beside what a process was seen to take
CONTESTANTS = ("crisp", "llama.cpp", "accelerate")
PACKAGES = ("torch", "transformers", "accelerate", "llama-cpp-python", "numba")


def prepare(folder: Path) -> None:
    """Make the checkpoint, the same as GGUF, and its store."""
    for script, *arguments in (
        ("model.py", folder / "model"),
        ("to_gguf.py", folder / "model", folder / "model.gguf"),
    ):
        _say(f"{script}: {arguments[-1].name}")
        subprocess.run([sys.executable, HERE / script, *arguments], check=True)
    pack = ["-m", "crisp", "pack", folder / "model", "--out", folder / "store"]
    subprocess.run([sys.executable, *pack], check=True, stdout=sys.stderr)


def run(
    own: Group, folder: Path, name: str, cap: int | None, settings: argparse.Namespace, **how: Any
) -> dict[str, Any]:
    """Run one contestant; return its result, or why there is none."""
    own.limit(cap)
    options = [part for key, value in how.items() for part in (f"--{key}", str(value))]
    command = [
        sys.executable, str(HERE / "runs.py"), name, str(folder),
        "--threads", str(settings.threads), "--tokens", str(settings.tokens),
        "--seconds", str(settings.seconds), *options,
    ]  # fmt: skip
    try:
        done = own.run(command, 8 * settings.seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"no end after {8 * settings.seconds:.0f} s"}
    finally:
        own.limit(None)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [""]
        killed = done.returncode in (-9, 137)
        return {"failed": "killed: out of memory" if killed else last[0][:200]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def base(name: str, found: dict[str, Any], budget: int, folder: Path) -> int:
    """Return the bytes that a contestant's process takes without experts: memory, code and all
    other weights, from a run that held hardly any experts.
    """
    skeleton = (folder / "model" / "model.safetensors").stat().st_size - model.EXPERT_BYTES
    more = {
        "crisp": skeleton - budget,  # mapped
        "llama.cpp": (folder / "model.gguf").stat().st_size - model.EXPERT_BYTES,  # mapped
        "accelerate": model.EXPERT_BYTES // model.LAYERS,  # it loads whole layers
    }
    return int(found["RssAnon"]) + int(found["Code"]) + more[name]


def main() -> int:
    """Measure, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--folder", type=Path, help="to keep the model in, or where it is")
    parser.add_argument("--out", type=Path, default=Path("docs/peers.md"))
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path()) as scratch:
        folder = settings.folder or Path(scratch)
        try:
            with group() as own:
                content = measure(own, folder, settings)
        except NoGroup as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    settings.out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    settings.out.write_text(page(content), "utf-8")
    return 0


def measure(own: Group, folder: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """Run all contestants at all caps; return the content of docs/peers.json."""
    if not (folder / "store").exists():
        prepare(folder)
    small = model.EXPERT_BYTES // 10
    bases, results = {}, []
    for name in CONTESTANTS:
        how = {"budget": small} if name == "crisp" else {}
        found = run(
            own, folder, name, None, argparse.Namespace(**vars(settings) | {"tokens": 2}), **how
        )
        _say(f"{name}, to see its size: {found}")
        bases[name] = base(name, found, small, folder)
    for share in SHARES:
        for name in CONTESTANTS:
            cap = bases[name] + int(share * model.EXPERT_BYTES) + SLACK
            how = {}
            if name == "crisp":
                how = {"budget": int(share * model.EXPERT_BYTES)}
            elif name == "accelerate":
                how = {"resident": int(share * model.LAYERS)}
            found = run(own, folder, name, cap, settings, **how)
            results.append({"contestant": name, "share": share, "cap": cap, **found})
            _say(f"{name} at {share:.0%}: {_speed(found)}")
    found = run(own, folder, "transformers", None, settings)
    results.append({"contestant": "transformers", "share": None, "cap": None, **found})
    _say(f"transformers, all in memory: {_speed(found)}")
    return {
        "conditions": {
            "date": datetime.date.today().isoformat(),
            "processor": processor_name(),
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "threads": settings.threads,
            "tokens": settings.tokens,
            "seconds": settings.seconds,
            "cgroup": own.version,
            "expert_bytes": model.EXPERT_BYTES,
            "token_bytes": model.TOKEN_BYTES,
            "bases": bases,
            "slack": SLACK,
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "results": results,
    }


def _speed(found: dict[str, Any]) -> str:
    if "failed" in found:
        return str(found["failed"])
    return f"{found['tokens'] / found['seconds']:.2f} tokens/s"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
