"""The paper's figures about quality, drawn with what the small models show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from crisp.reproduce.arithmetic import cold_event_ms, table1_costs, touched_share
from crisp.reproduce.claims import printed
from crisp.reproduce.evidence import ORDER_BUDGET, STRATEGIES, Evidence
from crisp.reproduce.findings.on_paper import loaded_percent
from crisp.reproduce.measured import quality_figures
from crisp.reproduce.page.drawing import (
    BLUE,
    GREEN,
    GREY,
    MODELS,
    ORANGE,
    PINK,
    draw_bars,
    draw_legend,
    figure_file,
    mark_paper,
    set_titles,
)
from crisp.reproduce.page.pictures import times

_MARKS = {"tiny-mixtral": "o", "tiny-deepseek": "v"}
_KINDS = {
    "tiered": ("CRISP", BLUE),
    "uniform": ("uniform", ORANGE),
    "dropping": ("dropping", GREEN),
}
_SMALL = {"all full": "full", "all 50 %": "all 50 %", "single": "single", "tiered": "tiered"}
_COLD = {
    "dominant only": ("none", "0 %", 0.0),
    "half": ("half", "50 %", 0.5),
    "full": ("full", "100 %", 1.0),
}


def memory(target: Path, evidence: Evidence) -> None:
    """Draw Figure 9: quality and speed where as much memory is used."""
    note = (
        "(a), (b): circles tiny-mixtral, triangles tiny-deepseek, pruned to what is stored; tiered "
        "widths store everything, so they stand at the bytes a token touches. The paper: 40 %.\n"
        "(c): Table 1's times, LRU in each layer; uniform: 50 % width; dropping: two experts of a "
        f"token, all resident. Diamonds: the paper. Routing: {evidence.routing_source}."
    )
    title = "Figure 9: the same memory"
    with figure_file(target, 3, title, note, (3.9, 3.6)) as (loss, kept, latency):
        for name, model in quality_figures().items():
            for kind, (_, colour) in _KINDS.items():
                rows = [row for row in model["memory"] if row["kind"] == kind]
                x = [100 * (row["bytes"] if kind == "tiered" else row["stored"]) for row in rows]
                for ax, figure_of in ((loss, "increase"), (kept, "kept")):
                    y = [100 * row[figure_of][0] for row in rows]
                    ax.plot(x, y, _MARKS[name], ms=5, color=colour, alpha=0.85)
        full = printed("F9.acc40", "full")
        for label, colour in _KINDS.values():
            mark_paper(kept, [40], [100 * printed("F9.acc40", label) / full], None, colour)
            loss.plot([], [], "-", color=colour, label=label)
        loss.set_yscale("symlog", linthresh=1)
        loss.set_ylim(bottom=-1)
        loss.yaxis.set_major_formatter("{x:g}")
        set_titles(loss, "(a) growth of perplexity", "%", "memory (%)")
        set_titles(
            kept, "(b) kept: predictions; the paper: accuracy", "% of full width", "memory (%)"
        )
        times(latency, evidence)
        draw_legend(loss, loc="upper right")


def strategies(target: Path, evidence: Evidence) -> None:
    """Draw Figure 13: what execution policies lose, and what they load."""
    note = (
        "Bytes by Eq. 4: nothing cached, as the paper's 50 % for half widths implies. LRU: "
        f"{ORDER_BUDGET} % of the experts in memory.\nRouting: {evidence.routing_source}."
    )
    title = "Figure 13: execution policies"
    with figure_file(target, 2, title, note, (4.6, 3.6)) as (loss, volume):
        names = list(STRATEGIES)[1:]
        full = printed("F13.ppl", "all full")
        heights = {
            model: (
                [100 * rows["strategies"][_SMALL[name]]["increase"][0] for name in names],
                colour,
            )
            for (model, rows), colour in zip(
                quality_figures().items(), MODELS.values(), strict=True
            )
        }
        draw_bars(loss, names, heights, 0.7)
        mark_paper(
            loss, range(len(names)), [100 * (printed("F13.ppl", n) / full - 1) for n in names]
        )
        loss.set_yscale("log")
        loss.yaxis.set_major_formatter("{x:g}")
        set_titles(loss, "(a) growth of perplexity", "% (log)")
        draw_legend(loss, loc="upper right")
        shares = {"all full": 1.0, "all 50 %": 0.5, "single": 0.5, "tiered": touched_share()}
        lru = [loaded_percent(evidence, width, "lru") for width in STRATEGIES.values()]
        draw_bars(
            volume,
            list(STRATEGIES),
            {"Eq. 4": ([100 * share for share in shares.values()], BLUE), "with LRU": (lru, PINK)},
            0.7,
        )
        mark_paper(volume, range(4), [printed("F13.io", name) for name in STRATEGIES])
        volume.set_ylim(0, 130)
        set_titles(volume, "(b) I/O volume", "% of full width")
        draw_legend(volume, loc="upper right", ncols=3)


def tiers(target: Path, evidence: Evidence) -> None:
    """Draw Figure 15: what each tier keeps, and what the Cold tier's auxiliary costs."""
    note = (
        "The paper: accuracy of Mixtral-8x7B on tasks; ours: tokens whose top prediction is the "
        "full model's.\nTime: an event by Table 1, overlapped, nothing cached."
    )
    with figure_file(target, 2, "Figure 15: tier by tier", note, (4.6, 3.6)) as (kept, cold):
        names = ("Hot", "Warm", "Cold")
        heights = _of_models(
            [
                [model["tiers"][name.lower()]["kept"][0] for name in names]
                for model in quality_figures().values()
            ]
        )
        draw_bars(kept, names, heights, 0.7)
        mark_paper(kept, range(3), [printed("F15.retention", name) for name in names])
        kept.set_ylim(70, 112)
        set_titles(kept, "(a) kept, by the tier of an event", "% of full width")
        draw_legend(kept, loc="upper right", ncols=3)
        auxiliary = list(_COLD)
        retention = _of_models(
            [
                [model["cold"][label][0] for _, label, _ in _COLD.values()]
                for model in quality_figures().values()
            ]
        )
        whole = cold_event_ms(table1_costs(), 1)
        slow = [
            100 * cold_event_ms(table1_costs(), width) / whole for _, _, width in _COLD.values()
        ]
        places = draw_bars(cold, auxiliary, {**retention, "time": (slow, GREY)}, 0.8)
        full = printed("F15.cold", "full")
        printed_times = [100 * printed("F15.cold", part) / full for part, _, _ in _COLD.values()]
        mark_paper(cold, places["time"], printed_times)
        ends = [places[name][place] for name in MODELS for place in (0, 2)]
        kept_cold = printed("F15.retention", "Cold")
        mark_paper(cold, ends, [kept_cold, 100.0] * 2, None)
        cold.set_ylim(0, 132)
        set_titles(cold, "(b) Cold: the auxiliary's width", "% of full width")
        draw_legend(cold, loc="upper right", ncols=2)


def shift(target: Path, evidence: Evidence) -> None:
    """Draw Figure 16: metadata of other text."""
    worst = printed("F16.transfer", "transferred")
    note = (
        "Order, tiers and roles of the text's own kind (matched) or of another (transferred); "
        "order of another, tiers and roles of its own (refreshed).\nDiamonds: the paper's worst, "
        f"{worst:g} points of accuracy below matched. Bytes stand for its throughput."
    )
    title = "Figure 16: metadata of other text"
    kinds = {"matched": GREY, "transferred": ORANGE, "refreshed": BLUE}
    with figure_file(target, 2, title, note, (5.4, 2.4), rows=2) as axes:
        for place, (name, model) in enumerate(quality_figures().items()):
            moves = model["shift"]
            groups = [f"{move['of']}\n→ {move['on']}" for move in moves]
            for ax, value in ((axes[place], "kept"), (axes[place + 2], "bytes")):
                series: dict[str, tuple[Sequence[float], str]] = {
                    kind: ([100 * move[kind][value] for move in moves], colour)
                    for kind, colour in kinds.items()
                }
                places = draw_bars(ax, groups, series, 0.8)
                ax.set_ylim(0, 132 if value == "kept" else 100)
            kept = [100 * move["matched"]["kept"] - worst for move in moves]
            mark_paper(axes[place], places["transferred"], kept)
            set_titles(axes[place], f"{name}: (a) predictions kept", "%")
            set_titles(axes[place + 2], f"{name}: (b) bytes a token touches", "% of full width")
            draw_legend(axes[place], loc="upper right", ncols=4)


def _of_models(shares: Sequence[Sequence[float]]) -> dict[str, tuple[Sequence[float], str]]:
    """Return each small model's shares in percent, with its colour."""
    return {
        name: ([100 * share for share in values], colour)
        for (name, colour), values in zip(MODELS.items(), shares, strict=True)
    }
