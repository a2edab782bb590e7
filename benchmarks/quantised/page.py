"""docs/quantised.md, from what was measured; its words are in page.md beside this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONTENT, PAGE = "docs/quantised.json", "docs/quantised.md"
_WORDS = Path(__file__).with_name("page.md")

# method, what is read, the row of the differences; None: checked against a reimplementation
_FORMATS = (
    ("`mxfp4`", "gpt-oss: blocks of 32 with a power of two, experts stacked", "mxfp4"),
    (
        "`fp8`, `fbgemm_fp8`",
        "E4M3 and E5M2 with `weight_scale_inv` or `weight_scale`: of blocks (the last may be "
        "shorter), of rows, of the matrix",
        "fp8",
    ),
    (
        "`compressed-tensors`",
        "pack-quantized (w4a16, w8a16; also with zero points and `weight_g_idx`), int-quantized, "
        "float-quantized, naive-quantized",
        "compressed-tensors",
    ),
    (
        "`gptq`",
        "2, 4 and 8 bits, any group size, `g_idx` (`desc_act`), zeros of both versions",
        None,
    ),
    ("`awq`", '4 bits, version "gemm"', None),
    ("`bitsandbytes`", "nf4 and fp4, double quantisation too; int8", None),
)


def render(content: dict[str, Any]) -> str:
    """Return the page."""
    models, expert = content["scales"], content["memory"][0]["expert"]
    parts = {
        "formats": _formats(content["differences"]),
        "expert_mb": f"{expert / 1e6:.0f}",
        "memory": "\n".join(_memory_row(row) for row in content["memory"]),
        "tokens": " and ".join(f"{model['tokens']:,}" for model in models),
        "choice": f"{models[0]['choice_tokens']:,}",
        "tried": _tried(models),
        "spared": " and ".join(f"{_spared(model):.2f} %" for model in models),
        "scales": "\n\n".join(_scales(model) for model in models),
        "spread": " and ".join(f"{model['spread']:.1f}" for model in models),
    }
    page = _WORDS.read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(f"<<{name}>>", text)
    return page


def _formats(differences: list[dict[str, Any]]) -> str:
    measured, lines = {row["format"]: row for row in differences}, []
    for method, what, row in _FORMATS:
        against, largest = "a straight reimplementation, number by number, in the tests", "0"
        if row is not None:
            against = f"{measured[row]['library']}, its own dequantisation"
            largest = f"{measured[row]['difference']:g}"
        lines.append(f"| {method} | {what} | {against} | {largest} |")
    return "\n".join(lines)


def _memory_row(row: dict[str, Any]) -> str:
    return (
        f"| {row['kind']} | {row['checkpoint'] / 1e9:.2f} | {row['store'] / 1e9:.2f} | "
        f"{row['above'] / 1e6:,.0f} | {row['above'] / row['expert']:.1f} |"
    )


def _scales(model: dict[str, Any]) -> str:
    lines = [
        f"| {model['name']} | bits | error of products | perplexity | loss | over nearest | "
        "predictions kept |",
        "|---|---:|---:|---:|---:|---:|---:|",
        f"| as published | 16 | | {model['perplexity']:.2f} | | | |",
    ]
    for row in model["rows"]:
        over = "" if row["over_nearest"] is None else _percent(row["over_nearest"])
        lines.append(
            f"| {row['name']} | {row['bits']:g} | {100 * row['error']:.2f} % | "
            f"{row['perplexity']:.2f} | {_percent(row['ratio'])} | {over} | "
            f"{100 * row['kept']:.1f} % |"
        )
    return "\n".join(lines)


def _spared(model: dict[str, Any]) -> float:
    """Return by how many per cent the fit of int4's scales lowers perplexity."""
    row = next(row for row in model["rows"] if row["name"] == "int4, scales fitted")
    return float(100 * (1 - row["over_nearest"]["value"]))


def _tried(models: list[dict[str, Any]]) -> str:
    texts = {"choice": "calibration", "heldout": "held out"}
    names = [f"{model['name']}, {text}" for model in models for text in texts.values()]
    lines = [f"| int4 | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for rows in zip(*(model["tried"] for model in models), strict=True):
        cells = [_percent(row[text]) for row in rows for text in texts]
        lines.append(f"| {rows[0]['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(ratio: dict[str, Any]) -> str:
    low, high = (100 * (end - 1) for end in ratio["interval"])
    return f"{100 * (ratio['value'] - 1):.2f} % ({low:.2f} to {high:.2f})"


def write(root: Path, content: dict[str, Any]) -> None:
    """Write what was measured, and the page."""
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    (root / CONTENT).write_text(text, encoding="utf-8")
    (root / PAGE).write_text(render(content), encoding="utf-8")
