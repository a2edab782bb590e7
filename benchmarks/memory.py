"""Find what takes how much memory while a model writes, and write docs/memory.md.

Run it with `make memory`; it takes two minutes, 2 GB of memory and 8 GB of disk. The model is that
of `make peers`; `crisp generate` runs as a user runs it, and is looked at from outside, in
/proc/PID/smaps, between two tokens.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import model

from crisp.hw.calibration.tables import processor_name
from crisp.hw.store.reader import Store
from crisp.policy import Budget, named

BUDGET, TOKENS, SETTLED = "10%", 24, 8  # of experts; new tokens; those before memory is looked at
STAGING = 2 * model.EXPERT_BYTES // (model.LAYERS * model.EXPERTS)  # bytes beside the budget
ANONYMOUS = "Python's and the libraries' own"
TORCH = "torch's libraries"
LIBRARIES = {"/torch/": TORCH, "/llvmlite/": "LLVM, which links numba's kernels"}
OTHERS, SKELETON = "other libraries", "all other weights, mapped from the checkpoint"
Imports = Sequence[tuple[str, list["Mapping"], float]]
PACKAGES = ("torch", "transformers", "numba", "safetensors")
IMPORTS = (
    ("Python alone", "pass"),
    ("numpy", "import numpy"),
    ("the command line", "import crisp.cli.app"),
    ("torch", "import torch"),
    ("torch, and numba's compiler for the kernels", "import torch, crisp.hw.devices.cpu.kernels"),
    ("torch and transformers' Mixtral, all of it",
     "import torch, transformers.models.mixtral.modeling_mixtral"),
    ("torch and transformers' Mixtral, as `crisp generate` imports it",
     "from crisp.checkpoint.lean_imports import lean_imports; lean_imports(); "
     "import torch, transformers.models.mixtral.modeling_mixtral"),
)  # fmt: skip
"""Names and Python code of what is imported, each in a process of its own."""


HEAD = """# What takes memory

Beside the budget for experts a run needs memory for Python, its libraries, and the weights that are
no experts'. *Anonymous* memory stays as long as the process. Pages *of files*, such as code, are
read when they are used; the system drops those that have not been used for long when memory is
short, and a memory cgroup counts both. So a cap must leave room for what is anonymous and for what
is used again and again.

""".splitlines()

TAIL = """## What is left out, and what that saves

- **torch's compiler, sympy, tensors on several machines** (`crisp/checkpoint/lean_imports.py`).
  transformers imports all of it to run any model, and more where they are installed: scipy,
  accelerate, and through the compiler triton. `crisp generate` puts stand-ins in their place, which
  give way to the real modules as soon as anything wants more of them. The difference is that of the
  last two lines above. In your own process call `lean_imports()` before anything imports
  transformers, or do without it: nothing else depends on it.
- **Arithmetic without numbers** (`crisp/checkpoint/meta_device.py`): making a model without weights
  would import the same again, because torch computes with tensors that have no memory in Python.
- **A copy of the weights that are no experts'** (`crisp/hw/model/resident.py`): what the checkpoint
  holds as the model has it is mapped, so runs share it and nothing is copied. What is converted, as
  quantised weights are, or float32 routers, is copied, and so is all on a GPU. A checkpoint must
  not be changed while a run maps it.
- **Holes in the heap**: freed memory is returned to the system twice, after loading and before the
  first token. A single arena (`MALLOC_ARENA_MAX=1`) would save 5 MB more; it is left to you.
- **LLVM stays**: kernels come from numba's cache as machine code, but numba links them by LLVM, and
  fills its tables of types first. Nothing of its code is used while tokens are written.
- **torch and transformers themselves** take most of what is left, and importing less of torch than
  all of it is not possible.
""".splitlines()


@dataclass(frozen=True)
class Mapping:
    """A range of a process's memory: of what, and bytes by smaps' names."""

    path: str
    sizes: dict[str, int]

    @property
    def anonymous(self) -> int:
        """Bytes that no file has: they stay in memory as long as the process."""
        return self.sizes["Anonymous"]

    @property
    def clean(self) -> int:
        """Bytes of a file, which the system may drop and read again."""
        return self.sizes["Rss"] - self.anonymous

    @property
    def touched(self) -> int:
        """The part of `clean` that was used since the marks were cleared, at most."""
        return min(self.clean, self.sizes["Referenced"])


def mappings(smaps: str) -> list[Mapping]:
    """Return the memory that the text of a smaps describes."""
    found: list[Mapping] = []
    for line in smaps.strip().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            found.append(Mapping(" ".join(rest[4:]), {}))
        elif rest[1:] == ["kB"]:
            found[-1].sizes[first[:-1]] = 1024 * int(rest[0])
    return found


def kind(path: str) -> str:
    """Return what a mapping belongs to."""
    if path.endswith(".safetensors"):
        return SKELETON
    if not path.startswith("/"):
        return ANONYMOUS
    return next((name for part, name in LIBRARIES.items() if part in path), OTHERS)


def watch(command: list[str]) -> list[Mapping]:
    """Run `crisp generate`; return its memory between two tokens.

    The marks of which pages are used are cleared two tokens before.
    """
    said, marked, found = b"", False, list[Mapping]()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        of = Path(f"/proc/{process.pid}")
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            said += piece
            words = len(re.findall(rb"w\d", said))
            if words >= SETTLED and not marked:
                (of / "clear_refs").write_text("1")
                marked = True
            elif words >= SETTLED + 2 and not found:
                found = mappings((of / "smaps").read_text("utf-8"))
    if process.returncode or not found:
        raise SystemExit(f"crisp generate ended with {process.returncode}")
    return found


def measure_imports() -> Iterator[tuple[str, list[Mapping], float]]:
    """Yield name, memory and processor's seconds of each of the imports."""
    for name, code in IMPORTS:
        script = (
            f"import time\n{code}\nprint(time.process_time())\n"
            "print(open('/proc/self/smaps').read().rstrip())"
        )
        for _ in range(2):  # Python compiles what is imported for the first time
            done = subprocess.run(
                [sys.executable, "-c", script], check=True, capture_output=True, text=True
            )
        seconds, _, smaps = done.stdout.partition("\n")
        yield name, mappings(smaps), float(seconds)


def parts(found: list[Mapping], pool: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield name and anonymous, clean and touched bytes of each part of a process.

    pool: bytes of the experts' pool, budget and staging, which is anonymous memory.
    """
    budget, staging = pool - STAGING, STAGING
    for name in (ANONYMOUS, *LIBRARIES.values(), OTHERS, SKELETON):
        own = [mapping for mapping in found if kind(mapping.path) == name]
        sizes = (
            sum(mapping.anonymous for mapping in own),
            sum(mapping.clean for mapping in own),
            sum(mapping.touched for mapping in own),
        )
        if name == ANONYMOUS:
            yield "the budget, experts", budget, 0, 0
            yield "staging, two experts", staging, 0, 0
            sizes = sizes[0] - pool, *sizes[1:]
        yield name, *sizes


def page(found: list[Mapping], imports: Imports, pool: int) -> str:
    """Return the text of docs/memory.md."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    rows = list(parts(found, pool))
    rest = [row for row in rows if row[0] != "the budget, experts"]
    beside = [row for row in rest if row[0] != TORCH] + [(TORCH, rest_of(rest, TORCH), 0, 0)]
    lines = [
        *HEAD,
        f"Written by `make memory`: {datetime.date.today().isoformat()}, {processor_name()},",
        f"Linux {platform.release()}; {versions}.",
        "The model of [peers.md](peers.md): a random Mixtral with",
        f"{model.EXPERT_BYTES / 1e9:.2f} GB of experts; lru at a budget of {BUDGET}. In MB.",
        "",
        "| a run between two tokens | anonymous | of files | of these used for two tokens |",
        "|---|--:|--:|--:|",
        *(table_row(name, *sizes) for name, *sizes in rows),
        table_row("**without the budget**", *(sum(row[n] for row in rest) for n in (1, 2, 3))),
        "",
        f"Without the budget and torch's libraries' code that is {total(beside, 2)} MB, and",
        f"{total(beside, 3)} MB if of files only what is used for two tokens counts.",
        "",
        "What importing takes, each line in a process of its own:",
        "",
        "| imported | anonymous | torch's libraries' code | of other files | s of processor |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, memory, seconds in imports:
        code = sum(mapping.clean for mapping in memory if kind(mapping.path) == TORCH)
        clean = sum(mapping.clean for mapping in memory) - code
        lines.append(
            table_row(name, sum(mapping.anonymous for mapping in memory), code, clean)
            + f" {seconds:.1f} |"
        )
    return "\n".join([*lines, "", *TAIL]) + "\n"


def rest_of(rows: list[tuple[str, int, int, int]], name: str) -> int:
    """Return the anonymous bytes of the row of that name."""
    return next(row[1] for row in rows if row[0] == name)


def total(rows: list[tuple[str, int, int, int]], column: int) -> str:
    """Return anonymous bytes and those of a column in MB."""
    return f"{sum(row[1] + row[column] for row in rows) / 1e6:.0f}"


def table_row(name: str, *sizes: int) -> str:
    """Return a row of a table, sizes in MB."""
    return f"| {name} | " + " | ".join(f"{size / 1e6:.0f}" for size in sizes) + " |"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="to keep the model in, or where it is")
    parser.add_argument("--out", type=Path, default=Path("docs/memory.md"))
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path()) as scratch:
        folder = settings.folder or Path(scratch)
        if not (folder / "store").exists():
            model.write(folder / "model")
            pack = ["-m", "crisp", "pack", folder / "model", "--out", folder / "store"]
            subprocess.run([sys.executable, *pack], check=True, stdout=sys.stderr)
        command = [
            sys.executable, "-m", "crisp", "generate", str(folder / "model"), "--store",
            str(folder / "store"), "--policy", "lru", "--granularity", "block", "--budget", BUDGET,
            "--max-new-tokens", str(TOKENS), "--prompt", model.words(model.prompt()),
        ]  # fmt: skip
        watch(command)  # compiles kernels, if they are not yet
        found = watch(command)
        spec = Store.open(folder / "store").spec
        capacity = sum(Budget.parse(BUDGET).capacity(spec, named("lru").cache))
        pool = capacity * spec.block_bytes + STAGING
        settings.out.write_text(page(found, list(measure_imports()), pool), "utf-8")


if __name__ == "__main__":
    main()
