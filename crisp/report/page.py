"""The page: one file that needs nothing else, and that no text in a run can make do anything.

Texts are escaped, the script puts them into the page as text, and the page's own policy lets no
other script run and nothing be fetched. The same runs give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from crisp import TOOL
from crisp.report.caveats import caveats
from crisp.report.conditions import Conditions, Differing, values_of
from crisp.report.data import page_data
from crisp.report.table import Table
from crisp.report.timelines import Timeline

_SCRIPTS = ("common.js", "charts.js", "table.js", "timeline.js", "main.js")  # in this order
_MOST_VALUES = 12  # of a setting that differs


def page(table: Table, found: Conditions, timelines: Sequence[Timeline], names: list[str]) -> str:
    """The text of the page; names: of the files that the runs are from."""
    script = "(() => {\n" + "\n".join(_file(name) for name in _SCRIPTS) + "})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "HASH": f"sha256-{digest}",
        "TITLE": escape(title(table, found)),
        "LEAD": escape(lead(table, found)),
        "CAVEATS": "".join(f'<p class="note">{escape(line)}.</p>' for line in notes(table)),
        "STYLE": _file("page.css"),
        "CONDITIONS": _conditions(found),
        "FOOTER": escape(f"Made by {TOOL} from {', '.join(names)}."),
        "DATA": embedded(page_data(table, found, timelines)),
        "SCRIPT": script,
    }
    # in one pass: what is put in may hold such marks
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda mark: parts[mark[1]], _file("page.html"))


def title(table: Table, found: Conditions) -> str:
    """What a report is about, in a line."""
    policies = list(dict.fromkeys(name or "" for name in table.setting("policy.name")))
    models = list(dict.fromkeys(name or "" for name in table.setting("model.name")))
    machines = [name for name in dict.fromkeys(table.machines()) if name]
    said = _listed(policies, "policies", 6)
    if any(models):
        said += f": {_listed(models, 'models')}"
    return f"{said} on {_listed(machines, 'machines')}" if machines else said


def lead(table: Table, found: Conditions) -> str:
    """How many runs of which kind there are."""
    measured = sum(table.measured())
    runs = "1 run" if table.rows == 1 else f"{table.rows:,} runs"
    kinds = {0: "simulated", table.rows: "measured"}
    kind = kinds.get(measured, f"{table.rows - measured:,} simulated, {measured:,} measured")
    budgets = len(set(table.setting("budget.asked")))
    policies = len(set(found.policies))
    return (
        f"{runs}, {kind}: {policies} {'policy' if policies == 1 else 'policies'} at "
        f"{budgets} {'budget' if budgets == 1 else 'budgets'}"
    )


def embedded(content: Any) -> str:
    """JSON that may stand inside a script element: no < begins a tag, nor ends the element.

    >>> embedded({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def notes(table: Table) -> list[str]:
    """What has to be said of the runs, and of what is not among them."""
    lines = [*caveats(table.kinds())]
    if table.refused:
        cells = "1 cell" if table.refused == 1 else f"{table.refused:,} cells"
        lines.append(f"not shown: {cells} that the sweep refused")
    return lines


def _listed(names: Sequence[str], what: str, most: int = 3) -> str:
    if len(names) > most:
        return f"{len(names)} {what}"
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]


def _conditions(found: Conditions) -> str:
    parts = [_pairs(found.common)]
    if found.differing:
        rows = "".join(_differing(one) for one in found.differing)
        parts.append(
            '<div class="differs scroll"><table><thead><tr><th class="text" scope="col">differs'
            '</th><th class="text" scope="col">values, and how many runs have them</th></tr>'
            f"</thead><tbody>{rows}</tbody></table></div>"
        )
    if found.implied:
        names = escape(", ".join(found.implied))
        parts.append(f'<p class="note">These go with them, or with the policy: {names}.</p>')
    if found.rest:
        count = len(found.rest)
        parts.append(
            f"<details><summary>{count} more settings that all runs share</summary>"
            f"{_pairs(found.rest)}</details>"
        )
    return "\n".join(parts)


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    lines = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f"<dl>{''.join(lines)}</dl>"


def _differing(one: Differing) -> str:
    values = values_of(one)
    told = [f"<span>{escape(text)} <small>{runs:,}</small></span>" for text, runs in values]
    if len(told) > _MOST_VALUES:
        more = len(told) - _MOST_VALUES
        told = [*told[:_MOST_VALUES], f"<span><small>and {more:,} others</small></span>"]
    return (
        f'<tr><td class="text">{escape(one.label)}</td><td class="text">{"".join(told)}</td></tr>'
    )


def _file(name: str) -> str:
    return files("crisp.report").joinpath("assets", name).read_text(encoding="utf-8")
