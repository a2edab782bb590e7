"""Write docs/peers.md and its picture from docs/peers.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Cell, cells, marks, same_tokens
from benchmarks.peers.picture import draw
from benchmarks.peers.rivals import RIVALS
from crisp.files import atomic

CONTENT, PAGE, PICTURE = "docs/peers.json", "docs/peers.md", "docs/images/peers.png"
SHOWN = {
    "crisp": "CRISP",
    "llama.cpp": "llama.cpp, mmap",
    "llama.cpp repacked": "llama.cpp, repacked",
    "accelerate": "transformers, accelerate's disk offload",
    "transformers": "transformers, all in memory",
}
TITLES = {
    "bf16": "bf16, the same numbers for all",
    "int4": "4 bits: CRISP's int4 (4.25 bits), GGUF's Q4_0 (4.5 bits)",
}
_HEADINGS = {"bf16": "## bf16", "int4": "## 4 bits"}


def write(root: Path, content: dict[str, Any]) -> None:
    """Write the record, the page and its picture."""
    draw(root / PICTURE, content, SHOWN, TITLES)
    for name, text in (
        (CONTENT, json.dumps(content, indent=1) + "\n"),
        (PAGE, page(content)),
    ):
        with atomic(root / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def page(content: dict[str, Any]) -> str:
    """Return the text of docs/peers.md."""
    lines = [*_conditions(content), "## Marks", "", *_marks(content)]
    for format, record in content["formats"].items():
        lines += [_HEADINGS[format], "", *_format(format, record, content["conditions"])]
    return "\n".join([*lines, *_LOSSY, *_tried()]) + "\n"


def _conditions(content: dict[str, Any]) -> list[str]:
    told = content["conditions"]
    versions = ", ".join(f"{name} {number}" for name, number in told["versions"].items())
    return [
        "# CRISP and others under one memory cap",
        "",
        "One command makes this page, its picture and [peers.json](peers.json) (every run):",
        "",
        "    make peers     (as root, for memory cgroups)",
        "",
        f"{told['date']}, {told['processor']}, {told['cores']} cores, Linux {told['kernel']};",
        f"{versions}.",
        f"llama.cpp was built for: {told['built_for'] or 'not recorded'}.",
        "",
        f"A random-weight Mixtral shape (d 1024, d_ff 3584, {told['layers']} layers, 8 experts,",
        "top-2); greedy decoding of one sequence after a prompt of 64 tokens. The clock starts",
        f"behind the prompt and the first token; {told['tokens']} tokens, or as many as come",
        f"within {told['seconds']:g} s. {told['threads']} threads (of CRISP's, one reads). Each",
        "run is a process of its own, from cold caches, in a memory cgroup",
        f"(v{told['cgroup']}) that also counts the page cache; no swap. **All contestants have the",
        "same cap**: the least that CRISP runs in (its memory, code and all other weights, and no",
        "expert kept), and 25, 50, 75 and 100 % of the experts' bytes above it.",
        f"Median (range) of {told['repeats']} runs, by turns over the contestants; a run",
        "that was killed or refused is not repeated. CRISP: `lru`, granularity block, full width;",
        "its budget is what the cap leaves. accelerate keeps as many layers in memory as fit, and",
        "fewer where that was killed.",
        "",
        "![tokens a second against the cap](images/peers.png)",
        "",
    ]


def _marks(content: dict[str, Any]) -> list[str]:
    lines = ["| format | mark | found | |", "|---|---|---|---|"]
    for format, record in content["formats"].items():
        name = _HEADINGS[format].removeprefix("## ")
        lines += [
            f"| {name} | {one.mark} | {one.found} | {one.verdict} |" for one in marks(record, SHOWN)
        ]
    return [*lines, ""]


def _format(format: str, record: dict[str, Any], told: dict[str, Any]) -> list[str]:
    found, caps = cells(record), record["caps"]
    names = [name for name in SHOWN if any(who == name for who, _ in found)]
    heads = [f"{cap / 1e6:,.0f} MB" for cap in caps]
    lines = [
        f"{TITLES[format]}. All experts: {record['expert_bytes'] / 1e9:.2f} GB; a token uses a",
        f"quarter. CRISP's process takes {record['bases']['crisp'] / 1e6:,.0f} MB without experts,",
        f"and ran in {record['least'] / 1e6:,.0f} MB. Tokens a second:",
        "",
        "| | " + " | ".join([*heads, "no cap"]) + " |",
        "|---" + "|---:" * (len(caps) + 1) + "|",
    ]
    for name in names:
        row = [cell(found.get((name, cap))) for cap in (*caps, None)]
        lines.append(f"| {SHOWN[name]} | " + " | ".join(row) + " |")
    kept = {
        run["cap"]: run["resident"] for run in record["runs"] if run["contestant"] == "accelerate"
    }
    if kept:
        says = ", ".join(str(kept[cap]) for cap in caps if cap in kept)
        lines += ["", f"Of {told['layers']} layers accelerate kept {says} in memory."]
    lines += [""]
    if format == "int4":
        lines.append("The two round weights differently, so their texts differ.")
        return [*lines, ""]
    for other in ("transformers", "llama.cpp"):
        same, of = same_tokens(record, other)
        if of:
            lines.append(f"CRISP and {other} write the same first {same} of {of} tokens.")
    lines.append("Random weights leave small margins, where the order of a sum decides.")
    return [*lines, ""]


def cell(found: Cell | None) -> str:
    """Return a cell of a table: median and range, or why there is none."""
    if found is None:
        return ""
    if found.rate is None:
        return found.failed
    low, high = found.rates[0], found.rates[-1]
    return f"**{_short(found.rate)}** ({_short(low)}-{_short(high)})"


def _short(rate: float) -> str:
    return f"{rate:.2f}" if rate < 10 else f"{rate:.1f}"


_LOSSY = [
    "## Lossy policies",
    "",
    "None is in these tables: `crisp`, `saliency` and their like load fewer bytes and change the",
    "text, and random weights have no loss worth stating. [policies.md](policies.md) has bytes and",
    "loss on trained models, policy by policy.",
    "",
]


def _tried() -> list[str]:
    lines = [
        "## What was tried",
        "",
        "From the package index, on a machine without a GPU, 2026-12-01.",
        "",
    ]
    lines += ["| | version | what came of it |", "|---|---|---|"]
    return lines + [f"| {one.name} | {one.version} | {one.outcome} |" for one in RIVALS]
