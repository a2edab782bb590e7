"""Figures that the text of the page argues with, as it shows them."""

from __future__ import annotations

from crisp.reproduce.arithmetic import (
    COLD,
    HOT,
    LAYERS,
    NARROW,
    TOP_K,
    WARM,
    all_resident,
    bubble,
    bubble_overlapped,
    cold_time,
    figure5,
    table1,
    total,
    touched,
)
from crisp.reproduce.claims import claims, printed
from crisp.reproduce.evidence import (
    BITS,
    BUDGETS,
    GPU,
    STRATEGIES,
    TABLE1,
    Evidence,
    lengths,
    speeds,
)
from crisp.reproduce.findings.on_paper import volume_found
from crisp.reproduce.findings.on_speed import advantage
from crisp.reproduce.findings.small import WEIGHTED, percent, worst_move
from crisp.reproduce.measured import host, quality, routing
from crisp.reproduce.words import figure

_SAME_BYTES = "At the same bytes, tiered widths lose less than uniform ones"


def facts(evidence: Evidence) -> dict[str, str]:
    """By the names that ``page.md`` calls them."""
    return {
        **_times(evidence),
        **_routing(evidence),
        **_speed(evidence),
        **_bounds(evidence),
        **_rest(),
    }


def _times(evidence: Evidence) -> dict[str, str]:
    own, other = table1(), figure5()
    mega = evidence.expert_bytes / 1e6
    values = {
        "t1.load": own.load,
        "t1.compute": own.compute,
        "t1.layer": own.layer,
        "t1.rate": mega / own.load,
        "f5.rate": mega / other.load,
        "gpu.load": evidence.gpu.load,
        "gpu.rate": mega / evidence.gpu.load,
        "t1.bits": float(BITS) * own.load / evidence.gpu.load,
        "f5.bits": float(BITS) * other.load / evidence.gpu.load,
        "expert_mb": mega,
        "fo": 1000 / (LAYERS * total(own)),
        "naive": 100 * bubble(other),
        "ideal": 100 * min(bubble_overlapped(own), bubble_overlapped(other)),
        "ratio.t1": own.load / own.compute,
        "ratio.f5": other.load / other.compute,
        "resident.t1": all_resident(own),
        "resident.f5": all_resident(other),
        "touched": 100 * touched(),
        "spared": 100 * (1 - touched()),
        "cold.half": 100 * cold_time(own, NARROW) / cold_time(own, 1),
        "cold.none": 100 * cold_time(own, 0) / cold_time(own, 1),
        "cold.paper.half": 100 * printed("F15.cold", "half") / printed("F15.cold", "full"),
        "cold.paper.none": 100 * printed("F15.cold", "none") / printed("F15.cold", "full"),
    }
    return {name: figure(value) for name, value in values.items()}


def _routing(evidence: Evidence) -> dict[str, str]:
    known = routing()
    least, _, most = known["top_25_by_layer"]
    return {
        "run": _run(evidence),
        "made": evidence.made,
        "source": known["source"],
        "rows": f"{evidence.rows:,}",
        "mo": evidence.ahead,
        "mo.alike": _alike(evidence),
        "top.least": figure(100 * least),
        "top.most": figure(100 * most),
        **{
            f"lru.{name}": figure(volume_found(evidence, STRATEGIES[part], "lru"))
            for name, part in (("half", "all 50 %"), ("single", "single"), ("tiered", "tiered"))
        },
    }


def _alike(evidence: Evidence) -> str:
    budgets = [f"{budget}" for budget in BUDGETS if evidence.mo_is_lru(budget)]
    if not budgets:
        return ""
    return (
        ", which are resident already wherever a layer has room for two: at "
        f"{', '.join(budgets)} % MO fetches nothing ahead and is plain LRU"
    )


def _run(evidence: Evidence) -> str:
    if evidence.given is None:
        return "It takes about a minute on two cores."
    return (
        f"This page was made with `--trace {evidence.given}`: its figures are of that routing, its "
        "arguments were written for the drawn one. Every row counts as a decoded token."
    )


def _speed(evidence: Evidence) -> dict[str, str]:
    crisp = [speeds(TABLE1, "crisp", budget) for budget in BUDGETS]
    full = [speeds(TABLE1, "lru", budget) for budget in BUDGETS]
    rows = []
    for budget, tiered, whole in zip(BUDGETS, crisp, full, strict=True):
        own = [evidence.loads(run) for run in (whole, tiered)]
        own += [evidence.fewest_loads(policy, budget) for policy in ("mo", "crisp")]
        rows.append(f"| {budget} % | " + " | ".join(f"{loads:.1f}" for loads in own) + " |")
    fewer = {
        budget: 100 * (1 - evidence.loads(tiered) / evidence.loads(whole))
        for budget, tiered, whole in zip(BUDGETS, crisp, full, strict=True)
    }
    values = {
        "all": evidence.loads(speeds(TABLE1, "fo", BUDGETS[0])),
        "fewer.10": fewer[10],
        "fewer.50": fewer[50],
        "ms.10": 1000 / printed("F10.10", "CRISP"),
        "ms.30": 1000 / printed("F10.30", "CRISP"),
        "least.10": evidence.fewest_ms("crisp", 10),
        "least.30": evidence.fewest_ms("crisp", 30),
        "most.mo.10": 1000 / evidence.fewest_ms("mo", 10),
        "most.mo.30": 1000 / evidence.fewest_ms("mo", 30),
        "up.10": evidence.loads(speeds(TABLE1, "up", 10)),
        "bar.4090": evidence.speed(speeds(GPU, "crisp", 10)),
        "joules.by_speed": 100 * (1 - printed("F10.10", "FO") / printed("F10.10", "CRISP")),
    }
    known = lengths(evidence.rows)
    return {
        "loads": "\n".join(rows),
        **{name: figure(value) for name, value in values.items()},
        "length.first": f"{known[0]:,}",
        "length.last": f"{known[-1]:,}",
        "advantage.first": f"{advantage(evidence, known[0]):.3f}",
        "advantage.last": f"{advantage(evidence, known[-1]):.3f}",
    }


def _bounds(evidence: Evidence) -> dict[str, str]:
    """What routing does to a bound."""
    skewed, other = evidence.skewed, evidence.other
    assert skewed is not None and other is not None
    values = {
        f"bound.{name}": 1000 / routing.fewest_ms_here("crisp", 30)
        for name, routing in (("here", evidence), ("skewed", skewed), ("other", other))
    }
    values["bound.other.10"] = 1000 / other.fewest_ms_here("crisp", 10)
    shares = {
        "overlap.here": evidence.described.mean("overlap"),
        "overlap.skewed": skewed.described.mean("overlap"),
        "overlap.other": other.described.mean("overlap"),
        "skewed.top": skewed.described.mean("top"),
        "skewed.bottom": skewed.described.mean("bottom"),
        "bound.top": other.described.mean("top"),
    }
    values |= {name: 100 * share for name, share in shares.items() if share is not None}
    return {"bound.trace": other.made, **{name: figure(value) for name, value in values.items()}}


def _rest() -> dict[str, str]:
    kept = sum(
        share * printed("F15.retention", tier)
        for tier, share in (("Hot", HOT), ("Warm", WARM), ("Cold", COLD))
    )
    policies = quality()["tiny-mixtral"]["policies"]
    streams = claims()["T3.mixtral"].values["streams"]
    return {
        "weighted": figure(kept),
        **{f"moved.{what}": _moved(what) for what in ("transferred", "refreshed")},
        "small.uniform": "; ".join(
            f"{name}: {model['claims'][_SAME_BYTES][0]}" for name, model in quality().items()
        ),
        **{
            f"tiered.{name}": percent(policies[row]["increase"][0])
            for name, row in (("measured", "tiered"), ("weighted", WEIGHTED))
        },
        "host": host()["machine"],
        "host.mixtral": ", ".join(figure(us) for us in host()["us_a_token"]["mixtral-8x7b"]),
        "per_load": figure(streams / (LAYERS * TOP_K)),
    }


def _moved(what: str) -> str:
    """Points that the small models lose at worst."""
    return " and ".join(f"{worst_move(model, what):.1f}" for model in quality().values())
