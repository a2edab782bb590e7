"""The picture of the page: tokens a second against the cap, a panel for each format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.figures import cells
from crisp.files import atomic

# Okabe and Ito's palette; markers differ as well.
_LINES = {
    "crisp": ("#D55E00", "o"),
    "llama.cpp": ("#0072B2", "s"),
    "llama.cpp repacked": ("#56B4E9", "D"),
    "accelerate": ("#009E73", "^"),
    "transformers": ("#777777", "v"),
}


def draw(
    target: Path, content: dict[str, Any], shown: dict[str, str], titles: dict[str, str]
) -> None:
    """Draw medians with their ranges; the rightmost marks of a panel are without a cap."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(content["formats"]), sharey=True, squeeze=False)[0]
    for ax, (format, record) in zip(panels, content["formats"].items(), strict=True):
        found, caps = cells(record), record["caps"]
        away = caps[-1] + (caps[-1] - caps[0]) / len(caps)
        for name, (colour, marker) in _LINES.items():
            how = {"color": colour, "marker": marker, "capsize": 3, "markersize": 6}
            for where, style in ((caps, "-"), ([None], "none")):
                at = [cap for cap in where if (cell := found.get((name, cap))) and cell.rates]
                if not at:
                    continue
                middles = [found[name, cap].rate for cap in at]
                lows = [m - found[name, cap].rates[0] for m, cap in zip(middles, at, strict=True)]
                highs = [found[name, cap].rates[-1] - m for m, cap in zip(middles, at, strict=True)]
                xs = [(away if cap is None else cap) / 1e6 for cap in at]
                label = shown[name] if where is caps or name == "transformers" else None
                ax.errorbar(xs, middles, (lows, highs), linestyle=style, label=label, **how)
        ax.axvline((caps[-1] + away) / 2e6, color="#CCCCCC", linewidth=0.8)
        ax.set_xticks(
            [cap / 1e6 for cap in (*caps, away)],
            [f"{cap / 1e6:,.0f}" for cap in caps] + ["no\ncap"],
        )
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_title(titles[format], loc="left", fontsize=10)
        ax.set_xlabel("memory of the whole process, page cache included (MB)")
        ax.grid(axis="y", color="#E5E5E5", linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("tokens/s (log)")
    entries = {
        label: handle
        for ax in panels
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries, frameon=False, loc="outside lower center", ncols=5)
    figure.suptitle("Decoding under one memory cap: median and range", x=0.01, ha="left")
    with atomic(target) as temporary:
        figure.savefig(temporary, format="png")
