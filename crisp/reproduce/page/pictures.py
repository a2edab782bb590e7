"""The paper's figures about routing and speed, drawn anew with its own points in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from crisp.reproduce.arithmetic import (
    LAYERS,
    all_resident_ms,
    figure5_costs,
    most_hidden_share,
    table1_costs,
)
from crisp.reproduce.claims import printed
from crisp.reproduce.evidence import (
    BUDGETS,
    GPU,
    ORDERS,
    ORIN,
    POLICIES,
    TABLE1,
    Evidence,
    order_run,
    prompt_lengths,
    prompt_run,
    speed_run,
)
from crisp.reproduce.findings.on_paper import tier_shares
from crisp.reproduce.page.drawing import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    draw_bars,
    draw_legend,
    figure_file,
    mark_paper,
    set_titles,
)

_WIDTHS = (100, 87.5, 75, 62.5, 50, 37.5, 25)
_SHADES = {"Hot": "#fbe3cd", "Warm": "#fdf4e3", "Cold": "#eef2f6"}
_APART = 0.7  # percent: two of the paper's points would hide each other
_BUDGET = "memory for experts (% of all of them)"


def _routing(evidence: Evidence) -> str:
    return f"Routing: {evidence.routing_source}."


def _simulated(evidence: Evidence) -> str:
    return f"{_routing(evidence)} Table 1's times of an expert; LRU in each layer; batch 1."


def combinations(target: Path, evidence: Evidence) -> None:
    """Draw Figure 3: how often each pair is used, and the running sum."""
    shares = 100 * np.array(evidence.pairs)
    n = len(shares)
    note = f"{_routing(evidence)}\nMean over layers, each sorted by itself; alpha 0.6, beta 0.9."
    with figure_file(target, 1, "Figure 3: how unequally pairs are used", note, (6.4, 3.6)) as (
        ax,
    ):
        ends = np.cumsum([0, *tier_shares(evidence)])
        for (tier, shade), start, end in zip(_SHADES.items(), ends[:-1], ends[1:], strict=True):
            ax.axvspan(start, end, color=shade, lw=0)
            ax.text((start + end) / 2, 1.01, tier, transform=ax.get_xaxis_transform(),
                    ha="center", fontsize=8, color="#555555")  # fmt: skip
        edges = np.linspace(0, 100, n + 1)
        ax.bar((edges[1:] + edges[:-1]) / 2, shares, 80 / n, color=SKY)
        curve = ax.twinx()
        curve.spines["top"].set_visible(False)
        curve.plot(edges, np.concatenate([[0], shares.cumsum()]), color=BLUE, label="running sum")
        top, bottom = printed("F3.top25"), printed("F3.bottom29")
        mark_paper(curve, [25, 71], [top, 100 - bottom], "the paper: over 60 %, over 90 %")
        curve.set_ylim(0, 100)
        curve.tick_params(labelsize=8)
        curve.set_ylabel("running sum (%)", fontsize=8.5)
        draw_legend(curve, loc="upper left", bbox_to_anchor=(0.05, 1))
        ax.set_xlim(0, 100)
        set_titles(ax, "", "activations (%)", f"pairs, most frequent first (% of the {n} possible)")


def expert(target: Path, evidence: Evidence) -> None:
    """Draw Figure 5: loading and computing one expert, by width."""
    note = "Solid: loading; dashed: computing. Lines are linear in the width."
    sources = {
        "Figure 5's full width": (figure5_costs(), BLUE),
        "Table 1's two experts, halved": (table1_costs(), ORANGE),
        f"{GPU}, 4.25 bits": (evidence.gpu, GREEN),
    }
    with figure_file(target, 1, "Figure 5: one expert at a width", note, (6.4, 3.6)) as (ax,):
        shares = np.array(_WIDTHS)
        for name, (costs, colour) in sources.items():
            ax.plot(shares, costs.load * shares / 100, "-", color=colour, label=name)
            ax.plot(shares, costs.compute * shares / 100, "--", color=colour)
        for kind in ("io", "comp"):
            y = [printed(f"F5.{kind}.{width}") for width in ("full", "half")]
            mark_paper(ax, [100, 50], y, "the paper prints" if kind == "io" else None)
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_xlim(103, 22)
        ax.set_xticks(shares, [f"{share:g}" for share in shares])
        draw_legend(ax, loc="center left", bbox_to_anchor=(0, 0.43))
        set_titles(ax, "", "ms (log)", "width (% of the neurons)")


def budgets(target: Path, evidence: Evidence) -> None:
    """Draw Figure 10: tokens/s against the budget."""
    note = (
        f"{_simulated(evidence)}\nDotted: no cache, prefetcher or order can be faster with these "
        "widths, by Table 1 or Figure 5,\n"
        "and on this routing or one as unequal as the paper's Figure 3, the kinder."
    )
    with figure_file(target, 1, "Figure 10: speed against memory", note, (6.4, 4.0)) as (ax,):
        for name, policy in POLICIES.items():
            y = [evidence.speed(speed_run(TABLE1, policy, budget)) for budget in BUDGETS]
            ax.plot(BUDGETS, y, "o-", ms=4, color=COLOURS[name], label=name)
        for name in ("MO", "CRISP"):
            most = [1000 / evidence.fewest_ms(POLICIES[name], budget) for budget in BUDGETS]
            ax.plot(BUDGETS, most, ":", color=COLOURS[name], label=f"{name}, at most")
        for id in ("F10.10", "F10.30"):
            for name in ("FO", "MO", "CRISP") if id == "F10.10" else ("MO", "CRISP"):
                label = f"the paper's {name}" if id == "F10.10" else None
                mark_paper(ax, [int(id[-2:])], [printed(id, name)], label, COLOURS[name])
        ax.set_ylim(0, 18)
        ax.set_xticks(BUDGETS)
        ax.grid(axis="y", color="#E5E5E5", lw=0.6)
        draw_legend(ax, ncols=2, loc="upper left")
        set_titles(ax, "", "tokens/s", _BUDGET)


def machines(target: Path, evidence: Evidence) -> None:
    """Draw Figure 11: speed and energy on two machines."""
    note = (
        "Bars: modelled from data sheets (profiles of the simulator), not by Table 1's times; "
        "watts while loading\ncome from this very figure. The paper's FO: speed by Figure 10, "
        f"energy by its percentages.\n{_routing(evidence)}"
    )
    names = {GPU: "RTX 4090", ORIN: "Jetson AGX Orin"}
    keys = {GPU: "F11.4090", ORIN: "F11.orin"}
    title = "Figure 11: two machines, 10 % of the experts in memory"
    with figure_file(target, 2, title, note, (4.4, 3.6)) as (speed, energy):
        for ax, pick in ((speed, evidence.speed), (energy, evidence.joules)):
            heights = {
                name: ([pick(speed_run(machine, policy, 10)) for machine in names], COLOURS[name])
                for name, policy in POLICIES.items()
            }
            places = draw_bars(ax, list(names.values()), heights)
            if ax is speed:
                mark_paper(ax, places["CRISP"], [printed(key) for key in keys.values()])
                mark_paper(ax, places["FO"][:1], [printed("F10.10", "FO")], None)
                table = evidence.speed(speed_run(TABLE1, POLICIES["CRISP"], 10))
                ax.plot(places["CRISP"][:1], [table], "_", ms=14, mew=2, color="black",
                        label="CRISP by Table 1's times")  # fmt: skip
                continue
            joules = [printed(f"{key}.energy", "CRISP") for key in keys.values()]
            less = [printed(f"{key}.energy", "less than FO") / 100 for key in keys.values()]
            mark_paper(ax, places["CRISP"], joules)
            mark_paper(
                ax, places["FO"], [j / (1 - by) for j, by in zip(joules, less, strict=True)], None
            )
        set_titles(speed, "(a) speed", "tokens/s")
        set_titles(energy, "(b) energy, modelled", "J a token")
        draw_legend(speed, ncols=1, loc="upper left")


def schedules(target: Path, evidence: Evidence) -> None:
    """Draw Figure 14: orders of the tiered widths."""
    names = list(ORDERS)
    runs = [order_run(order) for order in ORDERS.values()]
    note = f"{_simulated(evidence)}\nDotted: at most. The paper prints two of the overlaps."
    title = "Figure 14: tiered widths in four orders, 20 % of the experts in memory"
    with figure_file(target, 2, title, note, (4.4, 3.4)) as (speed, hidden):
        draw_bars(speed, names, {"simulated": ([evidence.speed(run) for run in runs], BLUE)}, 0.6)
        mark_paper(speed, range(4), [printed("F14.tps", name) for name in names])
        speed.axhline(1000 / evidence.fewest_ms("crisp", 20), ls=":", color=GREY)
        shares = [100 * evidence.metric(run, "compute_hidden") for run in runs]
        draw_bars(hidden, names, {"simulated": (shares, SKY)}, 0.6)
        mark_paper(hidden, [1, 3], [printed("F14.overlap", names[place]) for place in (1, 3)])
        hidden.axhline(100 * most_hidden_share(), ls=":", color=GREY)
        hidden.set_ylim(0, 100)
        set_titles(speed, "(a) speed", "tokens/s")
        set_titles(hidden, "(b) computing that loads hide", "% of the experts' computing")
        for ax in (speed, hidden):
            draw_legend(ax, loc="upper left")


def prompts(target: Path, evidence: Evidence) -> None:
    """Draw Figure 17: tokens/s after prompts."""
    inputs = prompt_lengths(evidence.rows)
    note = (
        f"{_simulated(evidence)}\nDecoding after the prompt; attention is in the layer's time, "
        "which does not grow. The paper prints no figures here."
    )
    title = "Figure 17: speed after inputs of a length, 20 % of the experts in memory"
    with figure_file(target, 1, title, note, (6.4, 3.6)) as (ax,):
        for name, policy in POLICIES.items():
            y = [evidence.speed(prompt_run(policy, length)) for length in inputs]
            ax.plot(inputs, y, "o-", ms=4, color=COLOURS[name], label=name)
        ax.set_xscale("log", base=2)
        ax.set_xticks(inputs, [f"{length:,}" for length in inputs])
        ax.set_ylim(bottom=0)
        draw_legend(ax, ncols=4, loc="lower left")
        set_titles(ax, "", "tokens/s", "input (tokens)")


def times(ax: Any, evidence: Evidence) -> None:
    """Draw Figure 9 (c): ms a token against the budget."""
    shown = BUDGETS[:4]
    for name, policy in (("CRISP", "crisp"), ("uniform", "up")):
        y = [evidence.ms(speed_run(TABLE1, policy, budget)) for budget in shown]
        colour = BLUE if name == "CRISP" else ORANGE
        ax.plot(shown, y, "o-", ms=4, color=colour, label=name)
        mark_paper(ax, [40 - _APART], [printed("F9.lat40", name)], None, colour)
    resident = [budget for budget in shown if budget >= 25]  # two of eight experts
    ax.plot(resident, [all_resident_ms(table1_costs())] * len(resident), "s-", ms=4, color=GREEN,
            label="dropping")  # fmt: skip
    mark_paper(ax, [40 + _APART], [printed("F9.lat40", "dropping")], None, GREEN)
    ax.set_ylim(bottom=0)
    ax.set_xticks(shown)
    set_titles(ax, f"(c) a token's time, {LAYERS} layers", "ms", _BUDGET)
