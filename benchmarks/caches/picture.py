"""The picture of the page: loads above Belady's, a panel for each model."""

from __future__ import annotations

from pathlib import Path

from benchmarks.caches.figures import ORACLE, Runs, models, replayed
from crisp.files import atomic

# Okabe and Ito's palette; markers differ as well.
_LINES = {
    "static": ("#777777", "s"),
    "fifo": ("#E69F00", "D"),
    "lru": ("#0072B2", "o"),
    "lfu": ("#D55E00", "^"),
    "lfu-in-cache": ("#CC79A7", "v"),
    "lfru": ("#009E73", "P"),
    "slru": ("#56B4E9", "X"),
    "belady-forced": ("#000000", "."),
}


def draw(target: Path, runs: Runs) -> None:
    """Draw loads above the oracle's: by event above, by access below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown_models = models(runs)
    figure = Figure(figsize=(2.2 + 4 * len(shown_models), 7), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(shown_models), squeeze=False, sharex=True)
    budgets = runs.values("budget")
    shares = [float(budget.rstrip("%")) for budget in budgets]
    for column, model in enumerate(shown_models):
        model_runs = runs.of_model(model)
        best = [replayed(model_runs, budget, ORACLE) for budget in budgets]
        for row, how in enumerate(("by event", "by access")):
            ax = axes[row][column]
            for cache, (colour, marker) in _LINES.items():
                loads = [replayed(model_runs, budget, cache)[row] for budget in budgets]
                above = [100 * (x / y[row] - 1) for x, y in zip(loads, best, strict=True)]
                ax.plot(shares, above, "-", color=colour, marker=marker, label=cache)
            ax.set_title(f"{model}, {how}", loc="left", fontsize=10)
            ax.set_ylim(bottom=0)
            ax.set_xticks(shares)
            ax.grid(axis="y", color="#E5E5E5", linewidth=0.6)
            ax.spines[["top", "right"]].set_visible(False)
        axes[1][column].set_xlabel("memory for routed experts (% of all of them)")
    for row in range(2):
        axes[row][0].set_ylabel("loads above belady (%)")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="outside right center", fontsize=9)
    figure.suptitle("What each cache loads above the oracle", x=0.01, ha="left", fontsize=11)
    with atomic(target) as temporary:
        figure.savefig(temporary, format="png")
