"""docs/quality.md and its pictures, made of docs/quality.json and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.quality.page.claims import CLAIMS, CONTRADICTED, MIXED, OPEN, SHOWN, outcome
from benchmarks.quality.page.extract import EXTRACT, extract
from benchmarks.quality.page.sections import SECTIONS
from benchmarks.quality.page.tables import markdown, verdict
from crisp.files import atomic

Figure = dict[str, Any]
CONTENT, PAGE, IMAGES = "docs/quality.json", "docs/quality.md", "docs/images"
_HEAD = """\
# What widths cost in quality

The paper's observations and policies, measured on the small models of this project. They have some
millions of parameters: they say whether a mechanism does what it should, not what Mixtral-8x7B
would do. `crisp eval` measures the same on any other model. One command makes this page, its
pictures and [quality.json](quality.json) (every figure):

    python benchmarks/quality --data DIR     (make quality)

`DIR/data` holds `code`, `docs` and `kjv` (Python source, its documentation, the King James Bible)
as `KIND.calibration.txt` and `KIND.heldout.txt`; the latter was held out from calibration and from
the models' training, the former was not held out from training. It takes some five minutes of
processor time a model.
"""
_HOW = """\
Models run in float32 on the CPU. Neurons are in importance order (from all calibration text) unless
a table says otherwise; orders are applied in memory, and a model that `crisp prepare` wrote from
the same text gives the same figures. *Bytes* are those of expert weights that a token touches, of
those at full width, shared experts not counted, weights as stored. *Increase* is the mean over the
kinds of text of perplexity over the full model's, less 1. *Predictions kept* is the share of tokens
whose top prediction is the full model's. Intervals are 95 % (bootstrap over windows, 1,000
resamples, within each kind, paired in every comparison; ± is half an interval's width); they say
how far another text of the same kind could differ, not another model.
"""
_SHORT = """\
## In short

By rule, from the intervals of the differences: **shown** where the whole interval is on the claimed
side, **not shown: the opposite** where it is on the other, **open** where it holds 0; where a claim
is about several differences, in how many of them, and their range. Figures are differences of
perplexity between the two that are compared, negative where the first is better, unless they have a
unit. Claims without a figure of the paper are comparisons with simple controls. A dash: with more
than two experts a token, its heaviest is always the dominant one, and there is nothing to compare.
"""


def render(content: Figure) -> str:
    """Return the page as Markdown."""
    models = content["models"]
    parts = [_HEAD, _conditions(models), _HOW, _SHORT + "\n" + _claims(models)]
    for section in SECTIONS:
        parts.append(f"## {section.title}\n\n{section.text}")
        if section.picture:
            parts.append(f"![{section.title}](images/quality-{section.picture}.png)")
        for model in models:
            parts.append(f"### {model['name']}: {section.title[0].lower()}{section.title[1:]}")
            parts.append(section.body(model["experiments"][section.name]))
            claim_lines = _claim_lines(section.name, model)
            if claim_lines:
                parts.append(claim_lines)
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def write(root: Path, content: Figure) -> None:
    """Write figures, page and pictures, and the figures that `crisp reproduce` has."""
    from benchmarks.quality.page.pictures import PICTURES

    (root / IMAGES).mkdir(parents=True, exist_ok=True)
    (root / EXTRACT).parent.mkdir(parents=True, exist_ok=True)
    for name, text in (
        (CONTENT, as_json(content)),
        (EXTRACT, as_json(extract(content))),
        (PAGE, render(content)),
    ):
        with atomic(root / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    for name, draw in PICTURES.items():
        draw(root / IMAGES / f"quality-{name}.png", content["models"])


def as_json(content: Figure) -> str:
    """Return the text of a file of figures."""
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _conditions(models: list[Figure]) -> str:
    head = ["", *(model["name"] for model in models)]
    columns = [_facts(model) for model in models]
    rows = [[what, *(model[what] for model in columns)] for what in columns[0]]
    return markdown(head, rows, len(head))


def _facts(model: Figure) -> dict[str, str]:
    spec, amounts = model["spec"], model["amounts"]
    texts = (text.split(" sha256:") for text in model["texts"])
    return {
        "shape": f"{len(spec['moe_layers'])} MoE layers of {spec['n_layers']}, "
        f"{spec['n_experts']} experts, top-{spec['top_k']}, {spec['d_ff']} neurons in blocks of "
        f"{model['block']}",
        "rarely used": f"{model['rare_experts']} of {len(spec['moe_layers']) * spec['n_experts']} "
        "experts had less than a tenth of an even share of the calibration tokens",
        "run": model["run"],
        "weights (sha256)": f"`{model['weights'][:16]}…`",
        "expert bytes a token, full": f"{model['expert_bytes_per_token'] / 1000:,.0f} KB",
        "held-out text": f"{model['scored']:,} tokens scored, windows of {model['window']}, no "
        "overlap",
        "calibration text, of each kind": f"{amounts['calibration']:,} tokens; for roles "
        f"{amounts['roles']:,}, for exact roles {amounts['exact']:,}",
        "texts (sha256)": ", ".join(f"{name} `{digest[:8]}…`" for name, digest in texts),
    }


def _claims(models: list[Figure]) -> str:
    parts = [" ".join(_count(model) for model in models)]
    for title, of in (("Of the paper", True), ("Simple controls", False)):
        rows = [
            [claim.text, *([claim.paper] if of else []), *verdicts]
            for claim in CLAIMS
            if bool(claim.paper) == of
            and (verdicts := [verdict(claim, model["experiments"]) or "–" for model in models])
        ]
        head = [title, *(["where"] if of else []), *(model["name"] for model in models)]
        parts.append(markdown(head, rows, len(head)))
    return "\n\n".join(parts)


def _count(model: Figure) -> str:
    """Return how many of the paper's observations a model shows, in a sentence."""
    outcomes = [
        outcome(claim, figures)
        for claim in CLAIMS
        if claim.paper and (figures := claim.find(model["experiments"]))
    ]
    return (
        f"Of {len(outcomes)} observations of the paper, {model['name']} shows "
        f"{outcomes.count(SHOWN)} and the opposite of {outcomes.count(CONTRADICTED)} (open: "
        f"{outcomes.count(OPEN)}, its figures divided: {outcomes.count(MIXED)})."
    )


def _claim_lines(section: str, model: Figure) -> str:
    """Return what this model shows of a section's claims, as a list."""
    lines = []
    for claim in CLAIMS:
        text = claim.section == section and verdict(claim, model["experiments"])
        if text:
            of = f" ({claim.paper})" if claim.paper else ""
            lines.append(f"- {claim.text}{of}: {text}.")
    return "\n".join(lines)
