"""docs/logs.md, made of docs/logs.json and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.logs import words
from crisp.diagnose.contracts import CONTRACTS
from crisp.files import atomic

CONTENT, PAGE = "docs/logs.json", "docs/logs.md"
_RULES = ("belady", "lru", "lfu", "layer", "layerlfu")
_MIB = 1 << 20


def write(root: Path, content: dict[str, Any]) -> None:
    """Write figures and page."""
    for name, text in (
        (CONTENT, json.dumps(content, indent=1, allow_nan=False) + "\n"),
        (PAGE, render(content)),
    ):
        with atomic(root / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def render(content: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    models = content["models"]
    cells = sum(len(model["curve"]) for model in models)
    parts = [
        words.HEAD,
        words.IMPORTS,
        _imports(content["imports"]),
        words.REPRODUCED,
        _reproduced(models),
        words.EQUAL,
        words.CURVES.format(cells=f"{_equal_cells(models)} of {cells}"),
        *(f"**{model['model']}**\n\n{_curve(model)}" for model in models),
        words.READINGS,
        _readings(models),
        words.TIMES,
        _times(models),
        _how_near(models),
        words.OTHERS,
        _others(models),
        words.DIAGNOSES,
        *(_diagnosis(one) for one in content["diagnoses"]),
        words.ENGINES,
        _engines(),
        words.RULES,
        _assumptions(),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _imports(logs: Sequence[dict[str, Any]]) -> str:
    rows = []
    for log in logs:
        absent = f"{log['absent']}" if log.get("absent") else ""
        equal = {True: "yes", False: "**no**", None: ""}[log["equal"]]
        rows.append([log["name"], f"`{log['recognised']}`", log["what"], absent, equal])
    head = ["log", "recognised as", "what is read", "(token, layer)s absent", "equal to the truth"]
    return table(head, rows)


def _reproduced(models: Sequence[dict[str, Any]]) -> str:
    def row(name: str, cell: Any) -> list[str]:
        return [name, *(cell(model) for model in models)]

    return table(
        ["", *(model["model"] for model in models)],
        [
            row("top-k; layers × experts", lambda m: f"{m['k']}; {m['layers']} × {m['experts']}"),
            row("bytes of an expert", lambda m: " / ".join(f"{n:,}" for n in m["expert_bytes"])),
            row("budget", lambda m: f"{m['budget_mib']:,} MiB"),
            row("prompt + decoded tokens", lambda m: f"{m['prompt']} + {m['tokens']}"),
            row("(token, layer)s without a record", lambda m: f"{m['absent']}"),
            row("hit %: engine", lambda m: f"{m['hit'][0]:.2f}"),
            row("hit %: recomputed", lambda m: f"{m['hit'][1]:.3f}"),
            row("MiB a token: engine", lambda m: f"{m['mib'][0]:.3f}"),
            row("MiB a token: recomputed", lambda m: f"{m['mib'][1]:.3f}"),
            row("most that a token's bytes differ", lambda m: f"{m['worst_token_bytes']:,}"),
            row("rates equal", lambda m: f"{m['rates_equal']:,} of {m['tokens']:,}"),
            row("flags equal", lambda m: f"{m['flags_equal']:,} of {m['flags']:,}"),
            row("curve cells equal", lambda m: f"{_equal_cells([m])} of {len(m['curve'])}"),
        ],
    )  # fmt: skip


def _equal_cells(models: Iterable[dict[str, Any]]) -> int:
    return sum(list(c["published"]) == list(c["found"]) for m in models for c in m["curve"])


def _curve(model: dict[str, Any]) -> str:
    rows = []
    for mib in dict.fromkeys(cell["mib"] for cell in model["curve"]):
        by_rule = {c["rule"]: c for c in model["curve"] if c["mib"] == mib}
        rows.append([f"{mib:,}", *(_cell(by_rule[rule]) for rule in _RULES)])
    return table(["MiB", *(f"`{rule}`" for rule in _RULES)], rows)


def _cell(cell: dict[str, Any]) -> str:
    """Return a hit rate of decoded tokens; with the published one where it is another."""
    if list(cell["published"]) == list(cell["found"]):
        return str(cell["found"][1])
    return f"{cell['found'][1]} (published {cell['published'][1]})"


def _readings(models: Sequence[dict[str, Any]]) -> str:
    names = list(models[0]["readings"])
    rows = [["as it is", *(f"{model['hit'][1]:.2f}" for model in models)]]
    rows += [[name, *(f"{m['readings'][name]:.2f}" for m in models)] for name in names]
    return table(["hit %", *(model["model"] for model in models)], rows)


def _times(models: Sequence[dict[str, Any]]) -> str:
    rows = []
    for model in models:
        for name, fit in model["times"].items():
            line = ""
            if "base_ms" in fit:
                line = f"{fit['base_ms']:.1f} + {fit['ms_per_mib']:.3f} × MiB"
            rows.append([
                f"{model['model']}: {name}", line,
                f"{fit['first_ms']:.0f}", f"{fit['foretold_ms']:.0f}", f"{fit['second_ms']:.0f}",
                f"{100 * fit['error']:+.1f} %", f"{100 * fit['typical']:.0f} %",
            ])  # fmt: skip
    head = ["", "fit", "first half", "second, foretold", "second, measured", "error", "typical"]
    return table(head, rows)


def _how_near(models: Sequence[dict[str, Any]]) -> str:
    def errors(name: str) -> str:
        each = sorted(100 * model["times"][name]["error"] for model in models)
        return f"{each[0]:+.1f} to {each[-1]:+.1f} %"

    qwen = models[1]["times"]["waiting"]
    text = (
        f"So what bytes cost is foretold ({errors('waiting')} on average; over the whole of "
        f"{models[1]['model']}'s run the line is {qwen['whole_base_ms']:.1f} ms + "
        f"{qwen['whole_slope']:.3f} ms/MiB), and what computing costs is not "
        f"({errors('computing')}): the phone heats up, lowers its clocks, and pages dense "
        "weights in again, which no trace of routing can know. A single token of gpt-oss-120b is "
        "foretold worst of all: computing it takes anything from 0.2 to 8 seconds."
    )
    return fill(text, 100)


def _others(models: Sequence[dict[str, Any]]) -> str:
    names = list(models[0]["engines"])
    cells = (
        [f"`{name}`", *("{:.1f}; {:,.0f}".format(*model["engines"][name]) for model in models)]
        for name in names
    )
    return table(["hit %; MiB a token", *(model["model"] for model in models)], cells)


def _diagnosis(one: dict[str, str]) -> str:
    return f"**{one['model']}**\n\n```console\n$ {one['command']}\n{one['text']}\n```"


def _engines() -> str:
    rows = []
    for contract in CONTRACTS.values():
        policy, counting = contract.policy, contract.counting
        when = "at each miss" if policy.at_once else "after the call"
        protects = ", protects" if policy.protects else ""
        bytes_read = "an expert's bytes"
        if counting.aligned:
            bytes_read += f" + {counting.aligned:,} a projection"
        rows.append([
            f"`{contract.name}`", policy.rule, policy.scope, f"{when}{protects}", counting.lookups,
            bytes_read,
        ])  # fmt: skip
    return table(["engine", "rule", "scope", "evicts", "looks up", "a miss reads"], rows)


def _assumptions() -> str:
    parts = []
    for contract in CONTRACTS.values():
        text = f"**{contract.name}**: {contract.title}. Source: {contract.source}."
        assumed = (f"- assumed: {line}" for line in contract.assumptions)
        parts.append(fill(text, 100) + "\n")
        parts[-1] += "".join(f"\n{fill(line, 100, subsequent_indent='  ')}" for line in assumed)
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column to the left, the others to the right."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
