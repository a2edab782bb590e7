"""The figures that the text of the page argues with, as it shows them."""

from __future__ import annotations

from crisp.reproduce.arithmetic import (
    COLD,
    HOT,
    LAYERS,
    NARROW,
    TOP_K,
    WARM,
    all_resident_ms,
    cold_event_ms,
    figure5_costs,
    idle_share,
    overlapped_idle_share,
    sequential_layer_ms,
    table1_costs,
    touched_share,
)
from crisp.reproduce.claims import claims, printed
from crisp.reproduce.evidence import (
    BITS,
    BUDGETS,
    GPU,
    STRATEGIES,
    TABLE1,
    Evidence,
    prompt_lengths,
    speed_run,
)
from crisp.reproduce.findings.on_paper import loaded_percent
from crisp.reproduce.findings.on_speed import advantage
from crisp.reproduce.findings.small import WEIGHTED, format_change, worst_move
from crisp.reproduce.measured import host_figures, quality_figures, routing_statistics
from crisp.reproduce.words import format_figure

_SAME_BYTES = "At the same bytes, tiered widths lose less than uniform ones"


def facts(evidence: Evidence) -> dict[str, str]:
    """Return the figures by their names in ``page.md``."""
    return {
        **_times(evidence),
        **_routing(evidence),
        **_speed(evidence),
        **_bounds(evidence),
        **_rest(),
    }


def _times(evidence: Evidence) -> dict[str, str]:
    """Return the figures about the paper's times."""
    table_costs, figure_costs = table1_costs(), figure5_costs()
    mega = evidence.expert_bytes / 1e6
    values = {
        "t1.load": table_costs.load,
        "t1.compute": table_costs.compute,
        "t1.layer": table_costs.layer,
        "t1.rate": mega / table_costs.load,
        "f5.rate": mega / figure_costs.load,
        "gpu.load": evidence.gpu.load,
        "gpu.rate": mega / evidence.gpu.load,
        "t1.bits": float(BITS) * table_costs.load / evidence.gpu.load,
        "f5.bits": float(BITS) * figure_costs.load / evidence.gpu.load,
        "expert_mb": mega,
        "fo": 1000 / (LAYERS * sequential_layer_ms(table_costs)),
        "naive": 100 * idle_share(figure_costs),
        "ideal": 100 * min(overlapped_idle_share(table_costs), overlapped_idle_share(figure_costs)),
        "ratio.t1": table_costs.load / table_costs.compute,
        "ratio.f5": figure_costs.load / figure_costs.compute,
        "resident.t1": all_resident_ms(table_costs),
        "resident.f5": all_resident_ms(figure_costs),
        "touched": 100 * touched_share(),
        "spared": 100 * (1 - touched_share()),
        "cold.half": 100 * cold_event_ms(table_costs, NARROW) / cold_event_ms(table_costs, 1),
        "cold.none": 100 * cold_event_ms(table_costs, 0) / cold_event_ms(table_costs, 1),
        "cold.paper.half": 100 * printed("F15.cold", "half") / printed("F15.cold", "full"),
        "cold.paper.none": 100 * printed("F15.cold", "none") / printed("F15.cold", "full"),
    }
    return {name: format_figure(value) for name, value in values.items()}


def _routing(evidence: Evidence) -> dict[str, str]:
    """Return the figures about the routing."""
    statistics = routing_statistics()
    least, _, most = statistics["top_25_by_layer"]
    return {
        "run": _run(evidence),
        "made": evidence.routing_source,
        "source": statistics["source"],
        "rows": f"{evidence.rows:,}",
        "mo": evidence.mo_prefetches,
        "mo.alike": _same_as_lru(evidence),
        "top.least": format_figure(100 * least),
        "top.most": format_figure(100 * most),
        **{
            f"lru.{name}": format_figure(loaded_percent(evidence, STRATEGIES[part], "lru"))
            for name, part in (("half", "all 50 %"), ("single", "single"), ("tiered", "tiered"))
        },
    }


def _same_as_lru(evidence: Evidence) -> str:
    """Return at which budgets MO is plain LRU, as the end of a sentence."""
    budgets = [f"{budget}" for budget in BUDGETS if evidence.mo_is_lru(budget)]
    if not budgets:
        return ""
    return (
        ", which are resident already wherever a layer has room for two: at "
        f"{', '.join(budgets)} % MO fetches nothing ahead and is plain LRU"
    )


def _run(evidence: Evidence) -> str:
    """Return how the page was made, in a sentence."""
    if evidence.trace_name is None:
        return "It takes about a minute on two cores."
    return (
        f"This page was made with `--trace {evidence.trace_name}`: its figures are of that "
        "routing, its arguments were written for the drawn one. Every row counts as a decoded "
        "token."
    )


def _speed(evidence: Evidence) -> dict[str, str]:
    """Return the figures about speed and loads."""
    crisp = [speed_run(TABLE1, "crisp", budget) for budget in BUDGETS]
    full = [speed_run(TABLE1, "lru", budget) for budget in BUDGETS]
    rows = []
    for budget, tiered, whole in zip(BUDGETS, crisp, full, strict=True):
        row = [evidence.loads(run) for run in (whole, tiered)]
        row += [evidence.fewest_loads(policy, budget) for policy in ("mo", "crisp")]
        rows.append(f"| {budget} % | " + " | ".join(f"{loads:.1f}" for loads in row) + " |")
    fewer = {
        budget: 100 * (1 - evidence.loads(tiered) / evidence.loads(whole))
        for budget, tiered, whole in zip(BUDGETS, crisp, full, strict=True)
    }
    values = {
        "all": evidence.loads(speed_run(TABLE1, "fo", BUDGETS[0])),
        "fewer.10": fewer[10],
        "fewer.50": fewer[50],
        "ms.10": 1000 / printed("F10.10", "CRISP"),
        "ms.30": 1000 / printed("F10.30", "CRISP"),
        "least.10": evidence.fewest_ms("crisp", 10),
        "least.30": evidence.fewest_ms("crisp", 30),
        "most.mo.10": 1000 / evidence.fewest_ms("mo", 10),
        "most.mo.30": 1000 / evidence.fewest_ms("mo", 30),
        "up.10": evidence.loads(speed_run(TABLE1, "up", 10)),
        "bar.4090": evidence.speed(speed_run(GPU, "crisp", 10)),
        "joules.by_speed": 100 * (1 - printed("F10.10", "FO") / printed("F10.10", "CRISP")),
    }
    prompts = prompt_lengths(evidence.rows)
    return {
        "loads": "\n".join(rows),
        **{name: format_figure(value) for name, value in values.items()},
        "length.first": f"{prompts[0]:,}",
        "length.last": f"{prompts[-1]:,}",
        "advantage.first": f"{advantage(evidence, prompts[0]):.3f}",
        "advantage.last": f"{advantage(evidence, prompts[-1]):.3f}",
    }


def _bounds(evidence: Evidence) -> dict[str, str]:
    """Return what the routing does to a bound."""
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
    return {
        "bound.trace": other.routing_source,
        **{name: format_figure(value) for name, value in values.items()},
    }


def _rest() -> dict[str, str]:
    """Return the figures about quality and the host."""
    kept = sum(
        share * printed("F15.retention", tier)
        for tier, share in (("Hot", HOT), ("Warm", WARM), ("Cold", COLD))
    )
    policies = quality_figures()["tiny-mixtral"]["policies"]
    streams = claims()["T3.mixtral"].values["streams"]
    return {
        "weighted": format_figure(kept),
        **{f"moved.{what}": _moved(what) for what in ("transferred", "refreshed")},
        "small.uniform": "; ".join(
            f"{name}: {model['claims'][_SAME_BYTES][0]}"
            for name, model in quality_figures().items()
        ),
        **{
            f"tiered.{name}": format_change(policies[row]["increase"][0])
            for name, row in (("measured", "tiered"), ("weighted", WEIGHTED))
        },
        "host": host_figures()["machine"],
        "host.mixtral": ", ".join(
            format_figure(us) for us in host_figures()["us_a_token"]["mixtral-8x7b"]
        ),
        "per_load": format_figure(streams / (LAYERS * TOP_K)),
    }


def _moved(what: str) -> str:
    """Return the points that each small model loses at worst."""
    return " and ".join(f"{worst_move(model, what):.1f}" for model in quality_figures().values())
