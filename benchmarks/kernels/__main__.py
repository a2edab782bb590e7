"""Compile every form of the GPU kernels for every architecture: the end of docs/kernels.md.

Run it with `make kernels-report`. It takes some minutes and needs no GPU. It exits with 1 if a form
has a fault; the page then says which.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # not this folder: its modules have plain names

from benchmarks.kernels.compiling import Report, report_named  # noqa: E402
from benchmarks.kernels.forms import forms  # noqa: E402
from benchmarks.kernels.page import HEADING, section  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.files import atomic  # noqa: E402
from crisp.hw.devices.gpu.kernels.launch import SHARED  # noqa: E402

PAGE = Path("docs/kernels.md")


def main() -> int:
    """Compile, print each result, and write the section; 1 if a form has a fault."""
    above, _, _ = PAGE.read_text("utf-8").partition(HEADING)
    try:
        reports = list(compile_all())
    except CrispError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with atomic(PAGE) as temporary:
        temporary.write_text(above + HEADING + section(reports), encoding="utf-8")
    bad = sum(bool(report.faults) for report in reports)
    print(f"{len(reports)} compiled, {bad} of them not as they must be: {PAGE}")
    return int(bad > 0)


def compile_all() -> Iterator[Report]:
    """Yield the report of each form on each architecture, in order; a process a CPU compiles."""
    jobs = [(arch, form.name) for arch in SHARED for form in forms(arch)]
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(
        os.cpu_count(), mp_context=context
    ) as pool:  # fmt: skip
        os.environ["TRITON_CACHE_DIR"] = folder  # of the processes that are started from now on
        for i, report in enumerate(pool.map(report_named, *zip(*jobs, strict=True)), 1):
            result = "; ".join(report.faults) or f"{report.registers} registers"
            print(f"{i:3}/{len(jobs)} sm_{report.arch} {report.form:32} {result}", flush=True)
            yield report


if __name__ == "__main__":
    sys.exit(main())
