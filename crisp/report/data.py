"""What a page draws, as one object that is safe for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from crisp.report.conditions import Conditions
from crisp.report.metrics import (
    BYTES,
    ENERGY,
    GROUPS,
    MAIN,
    PREFILL,
    SHOWN,
    SPEED,
    Chart,
    Shown,
    by_metric,
    decimals,
)
from crisp.report.table import Number, Table
from crisp.report.timelines import Timeline, steps_shown
from crisp.run.result import Run
from crisp.run.schema import COUNTS, NUMBERS
from crisp.run.timeline import KINDS

DIGITS = 6  # that are kept of a number
_MOST_NAMES = 12  # of the legend: with more, policies of one name share an entry
_LEAST = 1e-9  # ms: less is no time that anything could take
_REASON = "not in the file"


def page_data(table: Table, found: Conditions, timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Everything that the page's script needs; columns of ``rows`` values, texts by their codes."""
    many = len(set(found.policies)) > _MOST_NAMES
    legend = [name or "" for name in table.setting("policy.name")] if many else found.policies
    metrics, absent = shown_metrics(table)
    return {
        "rows": table.rows,
        "legend": coded(legend),
        "policy": coded(found.policies),
        "budget": coded(table.setting("budget.asked")),
        "share": [rounded(share and 100 * share) for share in table.shares()],
        "held": [rounded(share and 100 * share) for share in table.held()],
        "measured": [int(measured) for measured in table.measured()],
        "line": found.lines,
        "conditions": [
            {"label": differing.label, **coded(differing.values)} for differing in found.differing
        ],
        "groups": [
            {"name": name, "shown": place < 2}
            for place, (key, name) in enumerate(GROUPS.items())
            if any(shown.group == key for shown in metrics)
        ],
        "metrics": [_column(table, shown) for shown in metrics],
        "absent": absent,
        "charts": [_chart(table, chart) for chart in _charts(table)],
        "timelines": {
            "of": "token" if all(_a_token(one.run) for one in timelines) else "step",
            "names": [whose(one.run) for one in timelines],
            "kinds": KINDS,
            "steps": steps_shown(timelines) if timelines else [],
        },
    }


def shown_metrics(table: Table) -> tuple[list[Shown], list[dict[str, str]]]:
    """(the metrics that some run has, those that none has and why)."""
    metrics, absent = [], []
    for shown in (*SHOWN, *_others(table)):
        values = table.metric(shown.metric)
        if any(value is not None for value in values):
            if shown.metric != "skipped" or any(values):
                metrics.append(shown)
            continue
        reasons = sorted({reason or _REASON for reason in table.why(shown.metric)})
        absent.append({"head": f"{shown.head} ({shown.unit})", "why": "; ".join(reasons[:3])})
    return metrics, absent


def whose(run: Run) -> str:
    """Which run a timeline is of."""
    settings = run.settings
    machine = settings.get("device") or settings.get("hardware") or {"name": "an unnamed machine"}
    how = "measured" if settings["engine"] == "hw" else "simulated"
    policy, budget = settings["policy"]["name"], settings["budget"]["asked"]
    return f"{policy} at {budget}, {how} on {machine['name']}"


def _a_token(run: Run) -> bool:
    """Whether a step of a run is one token."""
    return (run.settings["phase"], run.settings["batch"]) == ("decode", 1)


def coded(values: Iterable[str | None]) -> dict[str, list[Any]]:
    """A column of texts: the different ones, and for each row which of them; -1: None.

    >>> coded(["a", "b", None, "a"])
    {'texts': ['a', 'b'], 'codes': [0, 1, -1, 0]}
    """
    places: dict[str, int] = {}
    codes = [-1 if value is None else places.setdefault(value, len(places)) for value in values]
    return {"texts": list(places), "codes": codes}


def rounded(value: Number) -> Number:
    """To six digits, whole numbers without a point.

    >>> rounded(12.34567891), rounded(3.0), rounded(None)
    (12.3457, 3, None)
    """
    if value is None:
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() else short


def _column(table: Table, shown: Shown) -> dict[str, Any]:
    values = [scaled(value, shown) for value in table.metric(shown.metric)]
    places = shown.decimals
    reasons = [
        (reason or _REASON) if value is None else None
        for value, reason in zip(values, table.why(shown.metric), strict=True)
    ]
    return {
        "key": shown.metric,
        "head": shown.head,
        "unit": shown.unit,
        "group": GROUPS[shown.group],
        "meaning": shown.meaning,
        "decimals": decimals(values) if places is None else places,
        "values": [rounded(value) for value in values],
        "why": coded(reasons),
    }


def scaled(value: Number, shown: Shown) -> Number:
    """A value in the unit in which it is shown."""
    return None if value is None else value * shown.factor


def _others(table: Table) -> list[Shown]:
    """What a sweep adds of its own, such as a loss."""
    known = {*COUNTS, *NUMBERS, *(shown.metric for shown in SHOWN)}
    return [
        Shown(name, name, "", MAIN, "of the sweep")
        for name, values in table.metrics.items()
        if name not in known and not name.endswith("_us_per_event") and set(values) != {None}
    ]


def _charts(table: Table) -> list[Chart]:
    speeds = [
        chart
        for chart in (SPEED, PREFILL)
        if any(value is not None for value in table.metric(chart.metric))
    ]
    return [*(speeds or [SPEED]), BYTES, ENERGY]


def _chart(table: Table, chart: Chart) -> dict[str, Any]:
    """A chart; what it cannot show, and why, is told in its place."""
    shown = by_metric(chart.metric)
    values = [rounded(scaled(value, shown)) for value in table.metric(chart.metric)]
    bounds = [{"name": name, "values": _bound(table, metric)} for name, metric in chart.bounds]
    return {
        "title": chart.title,
        "unit": shown.unit,
        "values": values,
        "bounds": [bound for bound in bounds if set(bound["values"]) != {None}],
        "missing": _missing(table, chart.metric, values),
    }


def _bound(table: Table, metric: str) -> list[Number]:
    """A bound in the unit of its chart: a time of a token as tokens a second.

    Times are of all rows, a speed is of the rows of one phase: of runs of both there is none.
    """
    if "_ms_" not in metric:
        return [rounded(scaled(value, by_metric(metric))) for value in table.metric(metric)]
    return [
        rounded(1000 / value) if value and value > _LEAST and phase != "all" else None
        for value, phase in zip(table.metric(metric), table.setting("phase"), strict=True)
    ]


def _missing(table: Table, metric: str, values: Sequence[Number]) -> list[dict[str, Any]]:
    """Why runs are not in a chart, and how many."""
    told: Counter[str] = Counter()
    for value, reason, share in zip(values, table.why(metric), table.shares(), strict=True):
        if value is None:
            told[reason or _REASON] += 1
        elif share is None:
            told["what share of all experts the budget is, is not known"] += 1
    return [{"why": why, "runs": runs} for why, runs in sorted(told.items())]
