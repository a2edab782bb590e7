"""The data of a page: what its script draws, as one object that is safe for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from crisp.report.conditions import SharedConditions
from crisp.report.metrics import (
    BYTES,
    ENERGY,
    GROUPS,
    MAIN,
    PREFILL,
    PREFILL_BYTES,
    PREFILL_ENERGY,
    PROMPTS,
    SHOWN,
    SPEED,
    Chart,
    Metric,
    decimals,
    find_metric,
)
from crisp.report.table import Number, RunTable
from crisp.report.timelines import Timeline, steps_shown
from crisp.run.result import Run
from crisp.run.schema import COUNTS, NAMED_BY_PHASE, NUMBERS
from crisp.run.timeline import KINDS

DIGITS = 6  # that are kept of a number
_MOST_NAMES = 12  # of the legend: with more, policies of one name share an entry
_LEAST = 1e-9  # ms: less is no time that anything could take
_REASON = "not in the file"


def page_data(
    table: RunTable, shared: SharedConditions, timelines: Sequence[Timeline]
) -> dict[str, Any]:
    """Return the page's data; columns hold ``rows`` values, texts by their codes."""
    many = len(set(shared.policies)) > _MOST_NAMES
    legend = [name or "" for name in table.setting("policy.name")] if many else shared.policies
    metrics, absent = shown_metrics(table)
    return {
        "rows": table.rows,
        "legend": encode_column(legend),
        "policy": encode_column(shared.policies),
        "budget": encode_column(table.setting("budget.asked")),
        "share": [round_number(share and 100 * share) for share in table.shares()],
        "held": [round_number(share and 100 * share) for share in table.floored_shares()],
        "measured": [int(measured) for measured in table.measured()],
        "line": shared.lines,
        "conditions": [
            {"label": differing.label, **encode_column(differing.values)}
            for differing in shared.differing
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
            "of": "token" if all(_step_is_token(one.run) for one in timelines) else "step",
            "names": [describe_run(one.run) for one in timelines],
            "kinds": KINDS,
            "steps": steps_shown(timelines) if timelines else [],
        },
    }


def shown_metrics(table: RunTable) -> tuple[list[Metric], list[dict[str, str]]]:
    """Return (the metrics that some run has, those that none has and why)."""
    metrics, absent = [], []
    for shown in (*SHOWN, *_others(table)):
        values = table.metric(shown.metric)
        if any(value is not None for value in values):
            if shown.metric != "skipped" or any(values):
                metrics.append(shown)
            continue
        if shown.group == PROMPTS:
            continue  # the speed of prompts is absent, too, and says it for all
        reasons = sorted({reason or _REASON for reason in table.reasons_for(shown.metric)})
        absent.append({"head": f"{shown.head} ({shown.unit})", "why": "; ".join(reasons[:3])})
    return metrics, absent


def describe_run(run: Run) -> str:
    """Name the run that a timeline belongs to."""
    settings = run.settings
    machine = settings.get("device") or settings.get("hardware") or {"name": "an unnamed machine"}
    how = "measured" if settings["engine"] == "hw" else "simulated"
    policy, budget = settings["policy"]["name"], settings["budget"]["asked"]
    return f"{policy} at {budget}, {how} on {machine['name']}"


def _step_is_token(run: Run) -> bool:
    """Return whether a step of a run is one token."""
    return (run.settings["phase"], run.settings["batch"]) == ("decode", 1)


def encode_column(values: Iterable[str | None]) -> dict[str, list[Any]]:
    """Return a column of texts as the distinct ones and each row's index into them; -1: None.

    >>> encode_column(["a", "b", None, "a"])
    {'texts': ['a', 'b'], 'codes': [0, 1, -1, 0]}
    """
    places: dict[str, int] = {}
    codes = [-1 if value is None else places.setdefault(value, len(places)) for value in values]
    return {"texts": list(places), "codes": codes}


def round_number(value: Number) -> Number:
    """Round to six digits; whole numbers lose their point.

    >>> round_number(12.34567891), round_number(3.0), round_number(None)
    (12.3457, 3, None)
    """
    if value is None:
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() else short


def _column(table: RunTable, shown: Metric) -> dict[str, Any]:
    """Return a metric's column of the table."""
    values = [scale_value(value, shown) for value in table.metric(shown.metric)]
    places = shown.decimals
    reasons = [
        (reason or _REASON) if value is None else None
        for value, reason in zip(values, table.reasons_for(shown.metric), strict=True)
    ]
    return {
        "key": shown.metric,
        "head": shown.head,
        "unit": shown.unit,
        "group": GROUPS[shown.group],
        "meaning": shown.meaning,
        "decimals": decimals(values) if places is None else places,
        "values": [round_number(value) for value in values],
        "why": encode_column(reasons),
    }


def scale_value(value: Number, shown: Metric) -> Number:
    """Return a value in the unit in which it is shown."""
    return None if value is None else value * shown.factor


def _others(table: RunTable) -> list[Metric]:
    """Return the metrics that a sweep adds of its own, such as a loss."""
    defined = {*COUNTS, *NUMBERS, *NAMED_BY_PHASE, *(shown.metric for shown in SHOWN)}
    return [
        Metric(name, name, "", MAIN, "of the sweep")
        for name, values in table.metrics.items()
        if name not in defined and not name.endswith("_us_per_event") and set(values) != {None}
    ]


def _charts(table: RunTable) -> list[Chart]:
    """Return the charts to draw: speed, bytes and energy of the phases that some run has."""
    return [
        chart
        for pair in ((SPEED, PREFILL), (BYTES, PREFILL_BYTES), (ENERGY, PREFILL_ENERGY))
        for chart in [
            chart
            for chart in pair
            if any(value is not None for value in table.metric(chart.metric))
        ]
        or pair[:1]
    ]


def _chart(table: RunTable, chart: Chart) -> dict[str, Any]:
    """Return a chart's data; what it cannot show is counted with the reasons."""
    shown = find_metric(chart.metric)
    values = [round_number(scale_value(value, shown)) for value in table.metric(chart.metric)]
    bounds = [{"name": name, "values": _bound(table, metric)} for name, metric in chart.bounds]
    return {
        "title": chart.title,
        "unit": shown.unit,
        "values": values,
        "bounds": [bound for bound in bounds if set(bound["values"]) != {None}],
        "missing": _missing(table, chart.metric, values),
    }


def _bound(table: RunTable, metric: str) -> list[Number]:
    """Return a bound in the unit of its chart: a time of a token as tokens a second.

    Bounds are of all rows, what they bound is of the rows of one phase: of runs of both there is
    none.
    """
    values = [
        None if phase == "all" else value
        for value, phase in zip(table.metric(metric), table.setting("phase"), strict=True)
    ]
    if "_ms_" not in metric:
        return [round_number(scale_value(value, find_metric(metric))) for value in values]
    return [round_number(1000 / value) if value and value > _LEAST else None for value in values]


def _missing(table: RunTable, metric: str, values: Sequence[Number]) -> list[dict[str, Any]]:
    """Return why runs are not in a chart, and how many."""
    reasons: Counter[str] = Counter()
    for value, reason, share in zip(values, table.reasons_for(metric), table.shares(), strict=True):
        if value is None:
            reasons[reason or _REASON] += 1
        elif share is None:
            reasons["what share of all experts the budget is, is not known"] += 1
    return [{"why": why, "runs": runs} for why, runs in sorted(reasons.items())]
