"""The memory that packing takes above what the process has when it begins."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.quantised.checkpoints import D_FF, D_MODEL, write

_CHILD = """
import json, sys, time
from pathlib import Path
from crisp.hw.store.packing import pack
import torch, transformers  # what is loaded either way is not what packing takes
import transformers.models.mixtral.modeling_mixtral, transformers.models.gpt_oss.modeling_gpt_oss

def highest():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

Path("/proc/self/clear_refs").write_text("5")
before, begin = highest(), time.monotonic()
store = pack(Path(sys.argv[1]), Path(sys.argv[2]))
print(json.dumps({"above": highest() - before, "seconds": time.monotonic() - begin,
                  "store": store.spec.routed_bytes, "experts": store.spec.n_routed}))
"""

EXPERT_F32 = 3 * D_MODEL * D_FF * 4
"""Bytes of one of these experts in float32."""


def measure(kind: str, nbytes: int, root: Path) -> dict[str, Any]:
    """Pack a random checkpoint of a kind, of ``nbytes`` or a little more, into bf16 in a process of
    its own.

    root: a folder for both, which are removed afterwards.
    """
    with tempfile.TemporaryDirectory(dir=root) as name:
        folder = Path(name)
        source = write(kind, folder, nbytes)
        files = [source] if source.is_file() else list(source.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        run = subprocess.run(
            [sys.executable, "-c", _CHILD, str(source), str(folder / "store")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if run.returncode:
            raise SystemExit(f"{kind}: {run.stderr[-2000:]}")
        result = json.loads(run.stdout.splitlines()[-1])
    return {"kind": kind, "checkpoint": size, "expert": EXPERT_F32, **result}
