"""Compiles every form of the kernels for every architecture: the last section of docs/kernels.md.

Run it with `make kernels-report`, for some minutes; it needs no GPU. It ends with 1 if a form is
not as it must be, and the page then says which.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import triton

from crisp.errors import CrispError
from crisp.files import atomic
from crisp.hw.devices.gpu.kernels.compiling import WEIGHTS, Report, report
from crisp.hw.devices.gpu.kernels.forms import Form, forms
from crisp.hw.devices.gpu.kernels.launch import SHARED

PAGE = Path("docs/kernels.md")
HEADING = "## As compiled\n"  # what follows it is written anew


def main() -> int:
    """Compile, tell how it goes, and write the section."""
    above, _, _ = PAGE.read_text("utf-8").partition(HEADING)
    try:
        reports = list(made())
    except CrispError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with atomic(PAGE) as temporary:
        temporary.write_text(above + HEADING + section(reports), encoding="utf-8")
    bad = sum(bool(found.faults) for found in reports)
    print(f"{len(reports)} compiled, {bad} of them not as they must be: {PAGE}")
    return int(bad > 0)


def made() -> Iterator[Report]:
    """A report of each form on each architecture, in order; by as many processes as CPUs."""
    jobs = [(arch, form.name) for arch in SHARED for form in forms(arch)]
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(
        os.cpu_count(), mp_context=context
    ) as pool:  # fmt: skip
        os.environ["TRITON_CACHE_DIR"] = folder  # of the processes that are to come
        for i, found in enumerate(pool.map(one, *zip(*jobs, strict=True)), 1):
            told = "; ".join(found.faults) or f"{found.registers} registers"
            print(f"{i:3}/{len(jobs)} sm_{found.arch} {found.form:32} {told}", flush=True)
            yield found


def one(arch: int, name: str) -> Report:
    """The report of a form by its name: kernels themselves do not go from process to process."""
    (form,) = (form for form in forms(arch) if form.name == name)
    return report(form, arch)


def section(reports: list[Report]) -> str:
    """What stands below the heading."""
    bad = sum(bool(found.faults) for found in reports)
    judged = f"{bad} of them not as they must be" if bad else "all of them as they must be"
    lines = [
        "",
        f"Written by `make kernels-report`: Triton {triton.__version__}, "
        f"{len(reports)} kernels, {judged}.",
    ]
    for arch, limit in SHARED.items():
        how = {form.name: launched(form) for form in forms(arch)}
        lines += [
            "",
            f"### sm_{arch}: {limit // 1024} KiB of shared memory",
            "",
            "| form | rows x neurons x columns, warps, stages | registers | spilled | stack "
            "| shared, KiB | weights by 16 bytes | anything | tensor cores | |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(row(found, how[found.form]) for found in reports if found.arch == arch),
        ]
    return "\n".join([*lines, ""])


def launched(form: Form) -> str:
    """The launch parameters of a form."""
    given = form.constexprs
    tile = " x ".join(str(given.get(key, 1)) for key in ("ROWS", "NEURONS", "COLUMNS"))
    return f"{tile}, {form.num_warps}, {form.num_stages}"


def row(found: Report, how: str) -> str:
    """A line of the table."""
    cells = [
        found.form,
        how,
        found.registers,
        f"{found.spill_stores}/{found.spill_loads}",
        found.stack,
        f"{found.shared / 1024:.1f}",
        "{} of {}".format(*found.counted(WEIGHTS)),
        "{} of {}".format(*found.counted()),
        ", ".join(f"{count} {name.partition('.')[0]}" for name, count in found.matrix) or "none",
        "; ".join(found.faults),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    sys.exit(main())
