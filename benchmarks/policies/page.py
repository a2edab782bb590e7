"""docs/policies.md from docs/policies.json: every number of the page is computed here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.policies.additions_page import additions_section
from benchmarks.policies.choosing import FAMILIES, LITTLE, MARK, SALIENCY, SPARE, STEPS
from benchmarks.policies.hardware_page import hardware_section
from benchmarks.policies.prefetching_page import prefetching_section
from benchmarks.policies.sections import promised_section, real_section
from benchmarks.policies.words import (
    Row,
    kilobytes,
    loss_of_row,
    percent,
    plain,
    points,
    table,
    times_fewer,
    with_interval,
    with_times,
)
from crisp.files import atomic

CONTENT = Path("docs/policies.json")
PAGE = Path("docs/policies.md")
PICTURE = Path("docs/images/policies.png")
CRISP, MOST, LEAST = "at crisp's loss", f"at {MARK:.1%}", f"at {LITTLE:.1%}"
"""For what loss policies were chosen."""
_PAPER = ("lru", "lru by block", "crisp")  # what is compared with, and what changes no widths


def write(root: Path, content: dict[str, Any]) -> None:
    """Write the page, its picture, and the figures they are made of."""
    from benchmarks.policies.picture import draw

    with atomic(root / CONTENT) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    with atomic(root / PAGE) as temporary:
        temporary.write_text(render(content), encoding="utf-8")
    draw(root / PICTURE, content)


def render(content: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    models = content["models"]
    picture = f"![Loss against bytes loaded](images/{PICTURE.name})"
    caption = "The picture is of the text that numbers were chosen on, the tables are of the other."
    parts = [_HEAD, _short(models), picture, caption]
    parts += [_of_model(model) for model in models]
    parts += [promised_section(models), _failed(models), prefetching_section(models)]
    parts.append(real_section(content["real"]))
    if "additions" in content:
        parts.append(additions_section(content["additions"]))
    if "hardware" in content:
        parts.append(hardware_section(content["hardware"]))
    return "\n\n".join(parts) + "\n"


def best(rows: Sequence[Row]) -> Row | None:
    """Return the chosen policy that loads least where it was chosen, the paper's left out."""
    candidates = [row for row in rows if row["family"] not in _PAPER]
    return min(candidates, key=lambda row: float(row["bytes"])) if candidates else None


def wins(row: Row) -> bool:
    """Whether a policy loads fewer bytes than crisp, interval and all, and loses no more."""
    return bool(row["over_crisp"]["interval"][1] < 1 and row["loss_above_crisp"]["value"] <= 0)


def of_family(rows: Sequence[Row], family: str) -> Row | None:
    """Return the row of a family; None where nothing of it loses as little as was asked."""
    return next((row for row in rows if row["family"] == family), None)


def gains(budget: Row) -> list[tuple[str, float]] | None:
    """Return each step's share of what `SALIENCY` loads less than lru by block, at MOST.

    In logarithms, so that factors add up. None where a step has nothing that loses so little.
    """
    rows = [of_family(budget["heldout"][MOST], name) for name in ("lru by block", *STEPS)]
    found = [row for row in rows if row is not None]
    if len(found) < len(rows):
        return None
    logs = [math.log(row["bytes"]) for row in found]
    whole = logs[0] - logs[-1]
    return [
        (name, (before - after) / whole)
        for name, (before, after) in zip(STEPS, pairwise(logs), strict=True)
    ]


def _short(models: Sequence[Row]) -> str:
    lines = ["**In short.**"]
    for model in models:
        lines.append(f"- {model['facts']['name']}:")
        for at in model["budgets"][:2]:
            row = of_family(at["heldout"][MOST], SALIENCY)
            told = "nothing of `saliency` loses so little"
            if row is not None:
                told = (
                    f"`saliency` loads {times_fewer(row['over_lru'])} times fewer bytes than "
                    f"`lru`, {times_fewer(row['over_lru_by_block'])} than `lru` by block, at a "
                    f"loss of {with_interval(row['loss'], percent)}"
                )
            lines.append(f"  at a {at['budget']} budget {told}.")
        chosen = [best(at["heldout"][CRISP]) for at in model["budgets"]]
        won = [row for row in chosen if row is not None and wins(row)]
        factors = [1 / row["over_crisp"]["value"] for row in won]
        gain = f"{min(factors):.2f} to {max(factors):.2f} times fewer" if won else "no fewer"
        lines.append(
            f"  At {len(won)} of {len(chosen)} budgets a policy of ours loads fewer bytes than "
            f"`crisp` and loses no more ({gain})."
        )
    return "\n".join(lines)


def _of_model(model: Row) -> str:
    facts, budgets = model["facts"], model["budgets"]
    spec = facts["spec"]
    blocks = -(-spec["d_ff"] // spec["block"])
    head = (
        f"## {facts['name']}\n\n{len(spec['moe_layers'])} layers of {spec['n_experts']} experts, "
        f"{spec['top_k']} a token, {blocks} blocks an expert; chosen on "
        f"{facts['tuning_tokens']:,} tokens, reported on {facts['heldout_tokens']:,} others. "
        f"{percent(facts['behind'])} of the blocks worth loading (of half of all) lie behind one "
        "that is not: so much more a store of arbitrary blocks could load than one of prefixes."
    )
    return "\n\n".join(
        [
            head,
            *(
                f"`saliency`, chosen for no more than {100 * most:.1f} %, beside `lru`, which "
                f"loses nothing:\n\n{table(_AT_MARK, [_beside_lru(at, why) for at in budgets])}"
                for most, why in ((MARK, MOST), (LITTLE, LEAST))
            ),
            "What each part of it is worth: kB a token of what was chosen for no more than "
            f"{100 * MARK:.1f} %, and in brackets the part's share of what is loaded less than by "
            f"`lru` by block (in logarithms):\n\n{_parts(budgets)}",
            "What loads least of ours, chosen for no more than `crisp`'s loss, beside `crisp`:\n\n"
            + table(_AT_CRISP, [(at, _crisp(at), best(at["heldout"][CRISP])) for at in budgets]),
            f"How many times fewer bytes than `lru` each family loads, chosen for no more than "
            f"{100 * MARK:.1f} % (and the loss on the other text); –: nothing loses so little:\n\n"
            + _families(budgets),
        ]
    )


def _parts(budgets: Sequence[Row]) -> str:
    shares = {at["budget"]: dict(gains(at) or ()) for at in budgets}
    columns: dict[str, Callable[[Any], str]] = {"": lambda name: f"{name}"}
    for at in budgets:
        columns[at["budget"]] = lambda name, at=at: _part_cell(  # type: ignore[misc]
            of_family(at["heldout"][MOST], name), shares[at["budget"]].get(name)
        )
    return table(columns, ["lru by block", *STEPS])


def _part_cell(row: Row | None, share: float | None) -> str:
    if row is None:
        return "–"
    return kilobytes(row) + ("" if share is None else f" ({100 * share:z.0f} %)")


def _failed(models: Sequence[Row]) -> str:
    lines = ["## What did not work\n"]
    cells = [at["heldout"][MOST] for model in models for at in model["budgets"]]
    for family in FAMILIES:
        if family.name in (*_PAPER, SALIENCY):
            continue
        pairs = []
        for rows in cells:
            own, ours = of_family(rows, family.name), of_family(rows, SALIENCY)
            if own is not None and ours is not None:
                pairs.append((own["bytes"], ours["bytes"]))
        better = sum(own < ours for own, ours in pairs)
        none = len(cells) - len(pairs)
        lines.append(
            f"- {family.name}: fewer bytes than *saliency* in {better} of {len(cells)} places"
            + (f"; in {none} nothing that loses so little" if none else "")
        )
    return "\n".join(lines)


def _families(budgets: Sequence[Row]) -> str:
    columns: dict[str, Callable[[Any], str]] = {"family": lambda family: family.name}
    for at in budgets:
        columns[at["budget"]] = lambda family, at=at: _cell(  # type: ignore[misc]
            of_family(at["heldout"][MOST], family.name)
        )
    return table(columns, FAMILIES)


def _cell(row: Row | None) -> str:
    return "–" if row is None else f"{1 / row['over_lru']['value']:.2f} ({loss_of_row(row)})"


def _crisp(at: Row) -> Row:
    row = of_family(at["heldout"][CRISP], "crisp")
    assert row is not None
    return row


def _beside_lru(at: Row, why: str) -> Line:
    lru = of_family(at["heldout"][CRISP], "lru")
    assert lru is not None
    return at, lru, of_family(at["heldout"][why], SALIENCY)


Line = tuple[Row, Row, Row | None]  # a budget, what is compared with, what was chosen


def _own(show: Callable[[Row], str]) -> Callable[[Line], str]:
    return lambda line: "–" if line[2] is None else show(line[2])


_AT_CRISP: dict[str, Callable[[Line], str]] = {
    "budget": lambda line: str(line[0]["budget"]),
    "crisp, kB a token": lambda line: kilobytes(line[1]),
    "its loss": lambda line: loss_of_row(line[1]),
    "ours": _own(lambda row: f"{row['family']}: `{row['value']}`"),
    "kB a token": _own(lambda row: kilobytes(row)),
    "loss": _own(lambda row: with_interval(row["loss"], percent)),
    "bytes over crisp": _own(lambda row: with_interval(row["over_crisp"], plain)),
    "loss above crisp, points": _own(lambda row: with_interval(row["loss_above_crisp"], points)),
}
_AT_MARK: dict[str, Callable[[Line], str]] = {
    "budget": lambda line: str(line[0]["budget"]),
    "lru, kB a token": lambda line: kilobytes(line[1]),
    "`--width`": _own(lambda row: f"`{row['value']}`"),
    "kB a token": _own(lambda row: kilobytes(row)),
    "loss": _own(lambda row: with_interval(row["loss"], percent)),
    "times fewer than lru": _own(lambda row: with_times(row["over_lru"])),
    "than lru by block": _own(lambda row: with_times(row["over_lru_by_block"])),
}


_HEAD = f"""# Which policy loads least at which loss

Written by `make policies`. The real models, in float32, neurons in order of importance, blocks of
16 neurons; every token of every layer is an event, and a cache within the budget is followed
through them: so the bytes are those that are loaded, and the loss is that of what is then executed.
Loss is the mean over three kinds of text (code, documentation, King James Bible) of the increase of
perplexity over the full model's. Brackets are 95 % intervals over resampled windows, paired.

Policies come in families that differ in one number. On one text the number is chosen: the fewest
bytes of those whose interval of the loss ends at {SPARE:.0%} or less of what is allowed, since
another text may lose more. Allowed is {100 * MARK:.1f} %, the paper's own loss for Mixtral, half
of that, or the loss of `crisp` (the paper's tiers .6 and .9, the dominant expert told by the
router's weight). On another text it is reported. Every reading is in
[policies.json](policies.json).

- *saliency* (`--policy saliency`): a resident block always runs; a missing one is loaded where
  router weight x sensitivity of the layer x the block's mean contribution reaches one threshold for
  all layers; what is executed of an expert is rescaled to stand for all of it; the cache keeps what
  is worth most ([contract](contract.md)). *One threshold* is the width rule alone, over an LRU.
- *contribution-resident*: the same with a threshold for each layer, such that the same share of
  every layer's blocks is worth loading, over an LRU. *contribution* does not look at what is
  resident.
- *tiered*: the paper's widths, by how often the two experts of a token occur together; *retained*:
  with the cache of saliency by blocks; *rescaled*: and with its rescaling.
- *resident*: auxiliary experts run at what is resident, at least at a floor.
- *skipped by weight*, *by contribution*: an expert whose weight (times its contribution) is below a
  share of the anchor's is left out (Lu et al.); *dropped experts*: the rarest of a layer never run.
- *uniform pruning*: of every expert the leading part.

An LRU by expert holds nothing in some layers where the budget is a few experts, which flatters what
is compared with it: the LRU by block stands beside it. These models are small, so the page says how
it might go with a large one, not how it goes."""
