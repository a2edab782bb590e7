"""docs/caches.md and its picture, made of docs/caches.json and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.caches.figures import ORACLE, Record, Runs, models, number, replayed, signed, table
from benchmarks.caches.words import CACHES, GLOBAL, HEAD, ORDERS, PREFETCHERS, SOURCES, SUFFIXES
from crisp.files import atomic

FORCED = "belady-forced"
CONTENT, PAGE, PICTURE = "docs/caches.json", "docs/caches.md", "docs/images/caches.png"


def write(root: Path, content: Record) -> None:
    """Write figures, page and picture."""
    from benchmarks.caches.picture import draw

    lines = ",\n".join(json.dumps(run, allow_nan=False) for run in content["runs"])
    rest = {key: value for key, value in content.items() if key != "runs"}
    text = json.dumps(rest, allow_nan=False)[:-1] + f', "runs": [\n{lines}\n]}}\n'
    (root / PICTURE).parent.mkdir(parents=True, exist_ok=True)
    for name, page in ((CONTENT, text), (PAGE, render(content))):
        with atomic(root / name) as temporary:
            temporary.write_text(page, encoding="utf-8")
    draw(root / PICTURE, Runs(content["runs"]).of(section="caches"))


def render(content: Record) -> str:
    """Return the page as Markdown."""
    runs = Runs(content["runs"])
    parts = [HEAD, _traces(content["traces"], runs), *_caches(runs.of(section="caches"))]
    parts += [GLOBAL, *_by_model(runs.of(section="global"), _global)]
    parts += [SUFFIXES, *_by_model(runs.of(section="suffixes"), _suffixes)]
    parts += [PREFETCHERS, *_by_model(runs.of(section="prefetchers"), _prefetchers)]
    parts += [ORDERS, *_orders(runs.of(section="orders")), SOURCES]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _traces(traces: dict[str, dict[str, str]], runs: Runs) -> str:
    rows = []
    for name, facts in traces.items():
        (tokens,) = runs.of(trace=name).values("tokens")
        cut = facts["cut"].removeprefix("profile: ").partition("; run")[0]
        rows.append([name, cut, f"{tokens:,}", f"`{facts['digest'][:16]}…`"])
    return table(["trace", "profile", "tokens run, of the rest", "digest of the rest"], rows)


def _by_model(runs: Runs, part: Any) -> list[str]:
    return [f"**{model}**\n\n{part(runs.of_model(model))}" for model in models(runs)]


def _caches(runs: Runs) -> list[str]:
    parts = [CACHES, "![Loads above Belady's](images/caches.png)", _checked(runs)]
    parts += ["### Loads a token: by event / by access, and one over the other", _ranges(runs)]
    parts += _by_model(runs, _side_by_side)
    parts += ["### Above `belady`: by event / by access", *_by_model(runs, _above)]
    return parts


def _checked(runs: Runs) -> str:
    below = sum(
        one["blocks_loaded"] < same_budget.of(cache="lru").records[0]["belady_blocks"]
        for trace in runs.values("trace")
        for budget in runs.values("budget")
        for by_access in (False, True)
        for same_budget in [runs.of(trace=trace, budget=budget, by_access=by_access)]
        for one in same_budget.records
    )
    theirs = [one for one in runs.records if one.get("libcachesim") is not None]
    same = sum(one["blocks_loaded"] == one["n_blocks"] * one["libcachesim"] for one in theirs)
    text = f"Of {len(runs.records)} runs, {below} load less than `belady`. "
    if not theirs:
        return text + "libCacheSim was not there to be compared with."
    versions = ", ".join(dict.fromkeys(one["libcachesim_version"] for one in theirs))
    names = ", ".join(f"`{one}`" for one in Runs(theirs).values("cache"))
    return text + (
        f"By access, {names} miss as often as\nlibCacheSim {versions}'s in {same} of "
        f"{len(theirs)} runs, each over all layers and all tokens that are run."
    )


def _ranges(runs: Runs) -> str:
    """Format by event over by access, from least to most."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for model in models(runs):
        model_runs = runs.of_model(model)
        for budget in runs.values("budget"):
            for cache in [*_online(model_runs), FORCED]:
                event, access = replayed(model_runs, budget, cache)
                ratios[cache == FORCED].append(event / access)
    worse = _worse(runs)
    blind, forced = (
        f"{min(values):.2f} to {max(values):.2f}" for values in (ratios[False], ratios[True])
    )
    return (
        f"For caches that evict without knowing the future × is {blind}: mostly below 1, as the\n"
        f"contract does not evict what the token still uses. For `{FORCED}` it is {forced}:\n"
        "what a whole event protects takes room that foresight would use better. So a study by "
        f"access misjudges a\ndevice, either way. {worse}"
    )


def _worse(runs: Runs) -> str:
    """Format where an oracle that must admit loads more by event than one without foresight."""
    places = []
    for model in models(runs):
        for budget in runs.values("budget"):
            model_runs = runs.of_model(model).of(budget=budget, by_access=False)
            least = min(model_runs.of(cache=cache).loads for cache in _online(model_runs))
            if (oracle := model_runs.of(cache=FORCED).loads) > least:
                places.append(f"{model} at {budget} ({number(oracle)}, not {number(least)})")
    if not places:
        return ""
    listed = ",\n".join(places)
    return f"By event\n`{FORCED}` loads more than the best of them on\n{listed}."


def _online(runs: Runs) -> list[str]:
    """Return the caches that evict, and do not know the future."""
    return [cache for cache in runs.values("cache") if cache not in ("none", "static", FORCED)]


def _named(runs: Runs) -> list[str]:
    """Return the caches of a table; the oracle that may decline before the one that must admit."""
    caches = runs.values("cache")
    place = caches.index(FORCED)
    return [*caches[:place], ORACLE, *caches[place:]]


def _side_by_side(runs: Runs) -> str:
    rows = []
    for cache in _named(runs):
        row = [f"`{cache}`"]
        for budget in runs.values("budget"):
            event, access = replayed(runs, budget, cache)
            row.append(f"{number(event)} / {number(access)} ×{event / access:.2f}")
        rows.append(row)
    return table(["cache", *runs.values("budget")], rows) + _all_one(runs)


def _all_one(runs: Runs) -> str:
    """Return the budgets at which it does not matter what is evicted."""
    same = [
        budget
        for budget in runs.values("budget")
        if len({runs.of(budget=budget, by_access=False, cache=c).loads for c in _online(runs)}) == 1
    ]
    if not same:
        return ""
    return (
        f"\n\nAt {' and '.join(same)} a layer has room for about as many experts as an event uses. "
        "Those that it does\nnot use have to go, whichever cache is asked: all are one."
    )


def _above(runs: Runs) -> str:
    """Format a cell, in bold the best by event of those without foresight."""
    rows: dict[str, list[str]] = {f"`{cache}`": [] for cache in runs.values("cache")}
    for budget in runs.values("budget"):
        best = replayed(runs, budget, ORACLE)
        loads_by_cache = {cache: replayed(runs, budget, cache) for cache in runs.values("cache")}
        least = min(loads for cache, (loads, _) in loads_by_cache.items() if cache != FORCED)
        for cache, loads_pair in loads_by_cache.items():
            event, access = (signed(x / y - 1, 0) for x, y in zip(loads_pair, best, strict=True))
            bold = cache != FORCED and loads_pair[0] == least
            rows[f"`{cache}`"].append(f"{f'**{event}**' if bold else event} / {access}")
    head = ["cache", *runs.values("budget")]
    return table(head, ([name, *row] for name, row in rows.items()))


def _global(runs: Runs) -> str:
    return _plain(runs, ORACLE)


def _suffixes(runs: Runs) -> str:
    places = [(budget, cache) for budget in runs.values("budget") for cache in ("lru", "lfu")]
    less = []
    for budget, cache in places:
        suffix, plain = (
            runs.of(budget=budget, cache=name).loads for name in (f"suffix-{cache}", cache)
        )
        if suffix < plain:
            less.append(f"`suffix-{cache}` at {budget}, by {100 * (1 - suffix / plain):.2g} %")
    named = f" ({'; '.join(less)})" if less else ""
    return _plain(runs, "belady-blocks") + (
        f"\n\nIn {len(less)} of {len(places)} places suffixes first load less than their own plain "
        f"rule{named}."
    )


def _plain(runs: Runs, oracle: str) -> str:
    """Format the loads a token, and how far they are above the oracle's."""
    budgets = runs.values("budget")
    rows = []
    for cache in runs.values("cache"):
        cache_runs = [runs.of(cache=cache, budget=budget) for budget in budgets]
        cells = (
            f"{number(one.loads)} ({signed(one.loads / one.fewest - 1, 0)})" for one in cache_runs
        )
        rows.append([f"`{cache}`", *cells])
    best = (number(runs.of(cache="lru", budget=budget).fewest) for budget in budgets)
    return table(["cache", *budgets], [*rows, [f"`{oracle}`", *best]])


def _prefetchers(runs: Runs) -> str:
    head = ["budget, prefetcher", "tokens/s", "loads a token", "useful", "late", "wasted"]
    rows = []
    for budget in runs.values("budget"):
        for name in runs.values("prefetch"):
            cell = runs.of(budget=budget, prefetch=name)
            row = [f"{budget} `{name}`", number(cell.speed), number(cell.loads)]
            for fate in ("useful", "late", "wasted"):
                key = f"prefetch_{fate}_bytes"
                applies = cell.records[0][key] is not None
                row.append(f"{cell.sum(key) / cell.sum('tokens') / 1e6:,.1f}" if applies else "")
            rows.append(row)
    return table([*head[:3], *(f"{name}, MB a token" for name in head[3:])], rows)


def _orders(runs: Runs) -> list[str]:
    parts = [_johnsons(runs)]
    for granularity in runs.values("granularity"):
        parts.append(f"### Whole runs, granularity {granularity}: ms a token, and the difference")
        parts += _by_model(runs.of(granularity=granularity), _whole)
    return parts


def _whole(runs: Runs) -> str:
    columns = [(where, batch) for where in runs.values("machine") for batch in runs.values("batch")]
    rows, most = [], 0.0
    for order in dict.fromkeys(name.partition("(")[0] for name in runs.values("order")):
        row = [f"`{order}`"]
        for where, batch in columns:
            cell = runs.of(machine=where, batch=batch)
            first = cell.of(order="widest")
            same = Runs(r for r in cell.records if r["order"].partition("(")[0] == order)
            time, loads = (
                same.sum(key) / same.sum("tokens") for key in ("total_ns", "blocks_loaded")
            )
            base = first.sum("total_ns") / first.sum("tokens")
            more = loads / (first.sum("blocks_loaded") / first.sum("tokens")) - 1
            most = max(most, abs(more))
            row.append(f"{time / 1e6:.2f}" if order == "widest" else signed(time / base - 1, 2))
        rows.append(row)
    head = ["order", *(f"{where}, batch {batch}" for where, batch in columns)]
    return table(head, rows) + (
        f"\n\nThe blocks that the orders load differ by at most {100 * most:.2f} %."
    )


def _johnsons(runs: Runs) -> str:
    """Format how often Johnson's rule, best within an event, is not the best over a run."""
    places: dict[tuple[Any, ...], dict[str, int]] = {}
    for one in runs.records:
        key = tuple(one[name] for name in ("trace", "machine", "granularity", "batch"))
        places.setdefault(key, {})[one["order"]] = one["total_ns"]
    lost = [times for times in places.values() if times["johnson"] > min(times.values())]
    worst = max((times["johnson"] / min(times.values()) - 1 for times in lost), default=0.0)
    return (
        f"Over whole runs, in {len(lost)} of {len(places)} settings (trace, machine, granularity, "
        f"batch) some other order ends\nsooner than `johnson`, by {100 * worst:.2f} % at most: the "
        "order of the loads decides which blocks are kept,\nand so what the next events find."
    )
