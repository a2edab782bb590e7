"""The last section of docs/kernels.md: a table of compiled kernels for each architecture."""

from __future__ import annotations

import triton

from benchmarks.kernels.compiling import WEIGHTS, Report
from benchmarks.kernels.forms import Form, forms
from crisp.hw.devices.gpu.kernels.launch import SHARED

HEADING = "## As compiled\n"  # what follows it is written anew


def section(reports: list[Report]) -> str:
    """Return the text below the heading."""
    bad = sum(bool(report.faults) for report in reports)
    verdict = f"{bad} of them not as they must be" if bad else "all of them as they must be"
    lines = [
        "",
        f"Written by `make kernels-report`: Triton {triton.__version__}, "
        f"{len(reports)} kernels, {verdict}.",
    ]
    for arch, limit in SHARED.items():
        parameters = {form.name: format_launch(form) for form in forms(arch)}
        lines += [
            "",
            f"### sm_{arch}: {limit // 1024} KiB of shared memory",
            "",
            "| form | rows x neurons x columns, warps, stages | registers | spilled | stack "
            "| shared, KiB | weights by 16 bytes | anything | tensor cores | |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(
                format_row(report, parameters[report.form])
                for report in reports
                if report.arch == arch
            ),
        ]
    return "\n".join([*lines, ""])


def format_launch(form: Form) -> str:
    """Return the launch parameters of a form, as the table shows them."""
    given = form.constexprs
    tile = " x ".join(str(given.get(key, 1)) for key in ("ROWS", "NEURONS", "COLUMNS"))
    return f"{tile}, {form.num_warps}, {form.num_stages}"


def format_row(report: Report, parameters: str) -> str:
    """Return a report as a line of the table."""
    cells = [
        report.form,
        parameters,
        report.registers,
        f"{report.spill_stores}/{report.spill_loads}",
        report.stack,
        f"{report.shared / 1024:.1f}",
        "{} of {}".format(*report.count_loads(WEIGHTS)),
        "{} of {}".format(*report.count_loads()),
        ", ".join(f"{count} {name.partition('.')[0]}" for name, count in report.matrix) or "none",
        "; ".join(report.faults),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"
