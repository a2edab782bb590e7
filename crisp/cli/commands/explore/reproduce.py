"""``crisp reproduce``: the paper's claims one by one, with what is found of each, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from crisp.reproduce.evidence import Evidence
    from crisp.reproduce.verdict import Finding

_INDENT, _WIDTH = 10, 100


def reproduce(
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE",
            help="Routing of 8 experts, top-2: a file, or the name of a bundled trace.  [default: "
            "drawn from statistics of a real Mixtral]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the page here, and the figures drawn anew."),
    ] = None,
    details: Annotated[
        bool,
        typer.Option("--details", help="Print every claim in full, as the page has it."),
    ] = False,
) -> None:
    """Check the claims of the CRISP paper, one by one.

    Each has what the paper prints, what is found here, and a verdict.
    """
    from crisp.cli.output.progress import progress_of
    from crisp.reproduce.findings.answers import findings
    from crisp.reproduce.page.page import IMAGES, PAGE, PICTURES, write_page
    from crisp.sim.paper_runs import gather

    files = [PAGE, *(f"{IMAGES}/{name}.png" for name in PICTURES)]
    if out is not None:
        _check(out, files, trace)
    with progress_of("runs") as update:
        evidence = gather(trace, update)
    results = findings(evidence)
    print("\n".join(_lines(evidence, results, details)))
    if out is None:
        print(
            f"\nevery claim in full: --details; the page and {len(PICTURES)} pictures: --out FOLDER"
        )
    else:
        with progress_of("pictures") as update:
            write_page(out, evidence, results, update)
        print(f"\nwrote {out / PAGE} and {len(PICTURES)} pictures in {out / IMAGES}")


def _check(out: Path, files: Sequence[str], trace: str | None) -> None:
    """Make the folder and refuse what could not be written, before the work."""
    from crisp.cli.options.files import check_outputs
    from crisp.errors import CrispError
    from crisp.trace.bundled import resolve_trace

    inputs = [("--trace", None if trace is None else resolve_trace(trace))]
    try:
        for folder in {(out / file).parent for file in files}:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CrispError(f"--out {out}: cannot be made: {error.strerror or error}") from error
    for file in files:
        check_outputs({"--out": out / file}, inputs)


def _lines(evidence: Evidence, found: Sequence[Finding], details: bool) -> list[str]:
    from crisp.reproduce.words import count_decided, count_verdicts

    lines = [
        "The CRISP paper, arXiv:2610.37442v1, claim by claim.",
        "",
        *_wrapped(f"routing   {evidence.routing_source}: {evidence.rows:,} tokens of "
                  f"{evidence.layers} layers are run"),
        "times     of Mixtral-8x7B's 32 layers, by the paper's Table 1 unless it says otherwise",
    ]  # fmt: skip
    lines += ["", f"{len(found)} claims, {count_decided(found)} of them decided here:"]
    lines += [f"{count:6}  {verdict}" for verdict, count in count_verdicts(found).items()]
    if details:
        return [*lines, *(line for finding in found for line in ("", *_claim(finding)))]
    return [
        *lines,
        "",
        *_table(found),
        "",
        "a claim of several parts has the gravest verdict of them",
    ]


def _table(found: Sequence[Finding]) -> list[str]:
    """Return a line for each claim."""
    from crisp.cli.output.columns import align_columns
    from crisp.reproduce.words import format_column, format_printed, used_columns

    columns: list[list[str]] = [[], [], [], []]
    for finding in found:
        ours = [format_column(part, "ours") for part in finding.parts.values()]
        cells = (
            finding.claim.id,
            finding.verdict,
            "/".join(format_printed(finding, part) for part in finding.parts),
            "/".join(ours) if "ours" in used_columns(finding) else "",
        )
        for column, cell in zip(columns, cells, strict=True):
            column.append(cell)
    return align_columns(["claim", "verdict", "paper", "ours"], columns, text=4)


def _claim(finding: Finding) -> list[str]:
    """Describe a claim: what it says, its figures, the verdict, and where they come from."""
    from crisp.cli.output.columns import align_columns
    from crisp.reproduce.words import format_column, format_printed, format_verdict, used_columns

    claim = finding.claim
    lines = [f"{claim.id}: {claim.says} ({claim.where})"]
    lines += _wrapped(f"{'':<{_INDENT}}{claim.setting}; in {claim.unit}")
    heads = used_columns(finding)
    columns = [
        list(claim.values),
        [format_printed(finding, part) for part in claim.values],
        *([format_column(found, head) for found in finding.parts.values()] for head in heads),
    ]
    table = align_columns(["", "paper", *heads], columns, text=1)
    lines += [f"{'':<{_INDENT}}{line}" for line in table]
    lines += _wrapped(f"{'':<{_INDENT}}-> {format_verdict(finding)}")
    for text in (finding.how, *finding.figures, *finding.shown):
        if text:
            lines += _wrapped(f"{'':<{_INDENT}}{text}")
    return lines


def _wrapped(line: str) -> list[str]:
    from textwrap import wrap

    return wrap(line, _WIDTH, subsequent_indent=" " * _INDENT, break_on_hyphens=False)
