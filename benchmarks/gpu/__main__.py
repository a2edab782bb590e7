"""Run every check that needs a GPU, in less than eight minutes: `make gpu-report`.

It needs Python 3.11 or newer with torch, triton, numpy, safetensors and xxhash, and this checkout;
nothing is installed. Pure Python packages that are missing there (simpy, nvidia-ml-py) may be in a
folder that ``--carried`` names. ``--dry-run`` runs all checks on the processor, with tiny matrices:
it shows that the script works, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Run all sections, write report.md and report.json; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="a folder")
    parser.add_argument("--carried", type=Path, help="a folder of Python packages")
    parser.add_argument("--dry-run", action="store_true", help="on the processor")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), *([str(options.carried)] if options.carried else [])]
    try:
        import torch
        from eager import Eager
        from machine import Machine
        from sections import SECTIONS

        from crisp.errors import CrispError
        from crisp.hw.devices.gpu.torch_cuda import TorchCuda
    except ImportError as error:
        print(f"error: {error.name} is needed and not installed: {error}", file=sys.stderr)
        return 2
    try:
        streams: Any = Eager() if options.dry_run else TorchCuda()
    except CrispError as error:
        print(f"error: {error}; --dry-run goes without one", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"conditions": conditions(torch, streams.name)}
    begin, failed = time.monotonic(), False
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        machine = Machine(
            streams, Path(folder), options.dry_run, "cpu" if options.dry_run else "cuda"
        )
        for title, check in SECTIONS.items():
            print(f"{time.monotonic() - begin:5.0f} s  {title}", file=sys.stderr, flush=True)
            try:
                report[title] = check(machine)
            except Exception:  # the other sections still run
                failed, report[title] = True, traceback.format_exc()
                print(report[title], file=sys.stderr)
            write(report, options.out)
    report["conditions"]["seconds"] = round(time.monotonic() - begin)
    write(report, options.out)
    print(options.out / "report.md")
    return int(failed)


def conditions(torch: Any, name: str) -> dict[str, Any]:
    """Return the machine and the versions that the figures were measured with."""
    facts = {
        "date": datetime.date.today().isoformat(), "gpu": name, "torch": torch.__version__,
        "python": platform.python_version(), "kernel": platform.release(),
    }  # fmt: skip
    if torch.cuda.is_available():
        import triton

        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda,
            "memory_bytes": properties.total_memory, "triton": triton.__version__,
        }  # fmt: skip
    return facts


def write(report: dict[str, Any], folder: Path) -> None:
    """Write report.json and report.md; called after every section, so that nothing gets lost."""
    from sections import format_cell

    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    facts = ", ".join(f"{key} {value}" for key, value in report["conditions"].items())
    dry = "none" in report["conditions"]["gpu"]
    title = "# A dry run on the processor: its figures say nothing" if dry else "# On a GPU"
    parts = [title, f"Written by `make gpu-report`: {facts}."]
    for title, rows in list(report.items())[1:]:
        parts.append(f"## {title}")
        if isinstance(rows, str):
            parts.append(f"Failed:\n\n```\n{rows}```")
            continue
        names = list(rows[0])
        lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
        lines += [f"| {' | '.join(format_cell(row[name]) for name in names)} |" for row in rows]
        parts.append("\n".join(lines))
    (folder / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
