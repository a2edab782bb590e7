"""The page: text written by hand (``page.md``), every figure in it from the findings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from textwrap import fill as fill_lines

from crisp.errors import InvariantError
from crisp.files import atomic
from crisp.reproduce.claims import claims
from crisp.reproduce.evidence import Evidence
from crisp.reproduce.measured import quality_figures
from crisp.reproduce.page import pictures, quality_pictures
from crisp.reproduce.page.facts import facts
from crisp.reproduce.verdict import Finding
from crisp.reproduce.words import (
    NONE,
    count_decided,
    count_verdicts,
    format_column,
    format_figure,
    format_printed,
    format_verdict,
    used_columns,
)

PAGE, IMAGES = "reproduction.md", "images/reproduction"
PICTURES: Mapping[str, Callable[[Path, Evidence], None]] = {
    "figure3": pictures.combinations,
    "figure5": pictures.expert,
    "figure9": quality_pictures.memory,
    "figure10": pictures.budgets,
    "figure11": pictures.machines,
    "figure13": quality_pictures.strategies,
    "figure14": pictures.schedules,
    "figure15": quality_pictures.tiers,
    "figure16": quality_pictures.shift,
    "figure17": pictures.prompts,
}
_WIDTH = 100
_LINK = re.compile(r"\[([a-z-]+\.md)\]\(\1\)")  # another page, called by its name
_SLOT = re.compile(r"\{\{([^{}]+)\}\}")


def write_page(
    out: Path,
    evidence: Evidence,
    findings: Sequence[Finding],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write page and pictures below ``out``, whose folders exist."""
    text = _reachable(render_page(evidence, findings), out)
    with atomic(out / PAGE) as temporary:
        temporary.write_text(text, encoding="utf-8")
    for done, (name, draw) in enumerate(PICTURES.items()):
        progress(done, len(PICTURES))
        draw(out / IMAGES / f"{name}.png", evidence)


def _reachable(text: str, out: Path) -> str:
    """Return the page without links to pages that do not lie beside it, as outside a checkout."""
    return _LINK.sub(lambda link: link[0] if (out / link[1]).is_file() else link[1], text)


def render_page(evidence: Evidence, findings: Sequence[Finding]) -> str:
    """Return the page as Markdown."""
    text = (files("crisp.reproduce.page") / "page.md").read_text(encoding="utf-8")
    by_id = {finding.claim.id: finding for finding in findings}
    extra = facts(evidence) | {
        "tally": _verdict_table(findings),
        "table": _claim_table(findings),
        "small": _small(findings),
        "notes": _notes(findings),
    }

    def fill(slot: re.Match[str]) -> str:
        key = slot[1]
        return extra[key] if key in extra else _figure(key, by_id)

    return "\n\n".join(map(_wrapped, _SLOT.sub(fill, text).rstrip("\n").split("\n\n"))) + "\n"


def _wrapped(paragraph: str) -> str:
    """Return a paragraph in lines that fit; tables, lists and indented text stay as they are."""
    if paragraph[0] in "#|-! ":
        return paragraph
    return fill_lines(paragraph, _WIDTH, break_on_hyphens=False, break_long_words=False)


def _figure(key: str, by_id: Mapping[str, Finding]) -> str:
    """Return the figure of ``ID``, ``ID part`` or ``ID part ours``: as printed, or as found."""
    id, _, rest = key.partition(" ")
    if id not in by_id:
        raise InvariantError(f"page.md: no figure is called {key!r}")
    finding = by_id[id]
    parts = list(finding.parts)
    for name in ("ours", "elsewhere", "least", "most"):
        part = rest.removesuffix(f" {name}")
        if part != rest and part in parts:
            return format_figure(getattr(finding.parts[part], name))
    part = rest or parts[0]
    if part not in parts:
        raise InvariantError(f"page.md: no figure is called {key!r}")
    return f"{finding.claim.values[part]:g}"


def _verdict_table(findings: Sequence[Finding]) -> str:
    rows = [f"| {verdict} | {count} |" for verdict, count in count_verdicts(findings).items()]
    head = f"Of {len(findings)} claims {count_decided(findings)} could be decided here.\n\n"
    return head + "\n".join(["| verdict | claims |", "|---|---:|", *rows])


def _claim_table(findings: Sequence[Finding]) -> str:
    head = ["claim", "", "where", "paper", "ours", "from the paper", "bound", "verdict"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += ["| " + " | ".join(_row(finding)) + " |" for finding in findings]
    return "\n".join(lines)


def _row(finding: Finding) -> list[str]:
    claim, heads = finding.claim, used_columns(finding)
    single = len(claim.values) == 1
    values = [
        format_printed(finding, part) if single else f"{part} {format_printed(finding, part)}"
        for part in claim.values
    ]
    bound = next((head for head in ("at least", "at most") if head in heads), None)
    cells = [
        " / ".join(format_column(figures, head) for figures in finding.parts.values())
        if head in heads
        else ""
        for head in ("ours", "from the paper", bound or "")
    ]
    if bound:
        cells[2] = f"{bound} {cells[2]}"
    says = f"{claim.says}, {claim.unit}"
    return [claim.id, says, claim.where, " / ".join(values), *cells, format_verdict(finding)]


def _notes(findings: Sequence[Finding]) -> str:
    """Return where the figures come from, and what small models have in their place."""
    claims_of: dict[str, list[str]] = {}
    for finding in findings:
        if finding.how:
            claims_of.setdefault(finding.how, []).append(finding.claim.id)
    lines = [f"- {', '.join(ids)}: {how}." for how, ids in claims_of.items()]
    for finding in findings:
        lines += [f"- {finding.claim.id}: {line}." for line in finding.figures]
    return "\n".join(lines)


def _small(findings: Sequence[Finding]) -> str:
    """Return what each small model says to the claims about quality, once for each."""
    names = list(quality_figures())
    texts = dict.fromkeys(text for finding in findings for text in finding.claim.small)
    where = {
        text: ", ".join(dict.fromkeys(c.where for c in claims().values() if text in c.small))
        for text in texts
    }
    lines = [
        "| of the paper | where | " + " | ".join(names) + " |",
        "|---" * (2 + len(names)) + "|",
    ]
    for text in texts:
        outcomes = [
            ": ".join(quality_figures()[name]["claims"].get(text, [NONE])) for name in names
        ]
        lines.append(f"| {text} | {where[text]} | " + " | ".join(outcomes) + " |")
    return "\n".join(lines)
