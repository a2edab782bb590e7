"""The page of a report: one self-contained file that no text in a run can make do anything.

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

from crisp.report.caveats import caveats
from crisp.report.conditions import DifferingSetting, SharedConditions, count_values
from crisp.report.data import page_data
from crisp.report.table import RunTable
from crisp.report.timelines import Timeline
from crisp.version import TOOL

_SCRIPTS = ("common.js", "charts.js", "table.js", "timeline.js", "main.js")  # in this order
_MOST_VALUES = 12  # of a setting that differs


def render_page(
    table: RunTable, shared: SharedConditions, timelines: Sequence[Timeline], names: list[str]
) -> str:
    """Return the text of the page; names: of the files that the runs are from."""
    script = "(() => {\n" + "\n".join(_asset(name) for name in _SCRIPTS) + "})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "HASH": f"sha256-{digest}",
        "TITLE": escape(format_title(table, shared)),
        "LEAD": escape(format_lead(table, shared)),
        "CAVEATS": "".join(f'<p class="note">{escape(line)}.</p>' for line in format_notes(table)),
        "STYLE": _asset("page.css"),
        "CONDITIONS": _render_conditions(shared),
        "FOOTER": escape(f"Made by {TOOL} from {', '.join(names)}."),
        "DATA": embed_json(page_data(table, shared, timelines)),
        "SCRIPT": script,
    }
    # in one pass: what is put in may hold such marks
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda mark: parts[mark[1]], _asset("page.html"))


def format_title(table: RunTable, shared: SharedConditions) -> str:
    """Return what a report is about, in a line."""
    policies = list(dict.fromkeys(name or "" for name in table.setting("policy.name")))
    models = list(dict.fromkeys(name or "" for name in table.setting("model.name")))
    machines = [name for name in dict.fromkeys(table.machines()) if name]
    line = _join_names(policies, "policies", 6)
    if any(models):
        line += f": {_join_names(models, 'models')}"
    return f"{line} on {_join_names(machines, 'machines')}" if machines else line


def format_lead(table: RunTable, shared: SharedConditions) -> str:
    """Return how many runs of which kind there are."""
    measured = sum(table.measured())
    runs = "1 run" if table.rows == 1 else f"{table.rows:,} runs"
    kinds = {0: "simulated", table.rows: "measured"}
    kind = kinds.get(measured, f"{table.rows - measured:,} simulated, {measured:,} measured")
    budgets = len(set(table.setting("budget.asked")))
    policies = len(set(shared.policies))
    return (
        f"{runs}, {kind}: {policies} {'policy' if policies == 1 else 'policies'} at "
        f"{budgets} {'budget' if budgets == 1 else 'budgets'}"
    )


def embed_json(content: Any) -> str:
    """Return JSON that may stand in a script element: no < begins a tag, nor ends the element.

    >>> embed_json({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def format_notes(table: RunTable) -> list[str]:
    """Return the caveats of the runs, and what is not among them."""
    lines = [*caveats(table.run_kinds())]
    if table.refused:
        cells = "1 cell" if table.refused == 1 else f"{table.refused:,} cells"
        lines.append(f"not shown: {cells} that the sweep refused")
    return lines


def _join_names(names: Sequence[str], what: str, most: int = 3) -> str:
    """Return the names as a list in words, or their number where they are many."""
    if len(names) > most:
        return f"{len(names)} {what}"
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]


def _render_conditions(shared: SharedConditions) -> str:
    """Return the conditions as HTML."""
    parts = [_render_pairs(shared.common)]
    if shared.differing:
        rows = "".join(_render_differing(one) for one in shared.differing)
        parts.append(
            '<div class="differs scroll"><table><thead><tr><th class="text" scope="col">differs'
            '</th><th class="text" scope="col">values, and how many runs have them</th></tr>'
            f"</thead><tbody>{rows}</tbody></table></div>"
        )
    if shared.implied:
        names = escape(", ".join(shared.implied))
        parts.append(f'<p class="note">These go with them, or with the policy: {names}.</p>')
    if shared.rest:
        count = len(shared.rest)
        parts.append(
            f"<details><summary>{count} more settings that all runs share</summary>"
            f"{_render_pairs(shared.rest)}</details>"
        )
    return "\n".join(parts)


def _render_pairs(pairs: Iterable[tuple[str, str]]) -> str:
    lines = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f"<dl>{''.join(lines)}</dl>"


def _render_differing(one: DifferingSetting) -> str:
    values = count_values(one)
    shown = [f"<span>{escape(text)} <small>{runs:,}</small></span>" for text, runs in values]
    if len(shown) > _MOST_VALUES:
        more = len(shown) - _MOST_VALUES
        shown = [*shown[:_MOST_VALUES], f"<span><small>and {more:,} others</small></span>"]
    return (
        f'<tr><td class="text">{escape(one.label)}</td><td class="text">{"".join(shown)}</td></tr>'
    )


def _asset(name: str) -> str:
    """Return the text of a file in ``assets``."""
    return files("crisp.report").joinpath("assets", name).read_text(encoding="utf-8")
