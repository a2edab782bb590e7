"""The picture of docs/policies.md: loss against bytes, a panel for each model and budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crisp.files import atomic

_SHOWN = ("10%", "30%", "50%")
_FAMILIES = {  # label, colour (Okabe and Ito's, told apart by all), marker
    "saliency": ("saliency", "#0072B2", "o"),
    "contribution-resident": ("contribution-resident", "#56B4E9", "s"),
    "resident": ("resident", "#009E73", "^"),
    "skipped by weight": ("skipped by weight", "#E69F00", "v"),
    "uniform pruning": ("uniform pruning", "#999999", "x"),
    "crisp": ("crisp", "#D55E00", "*"),
    "tiered, other cuts": ("tiered, other cuts", "#CC79A7", "d"),
}


def draw(path: Path, content: dict[str, Any]) -> None:
    """Draw loss against bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    models = content["models"]
    shown = [[at for at in model["budgets"] if at["budget"] in _SHOWN] for model in models]
    figure, axes = plt.subplots(
        len(models), len(_SHOWN), figsize=(10, 3.1 * len(models)), sharey=True, squeeze=False
    )
    for row, (model, budgets) in enumerate(zip(models, shown, strict=True)):
        for column, at in enumerate(budgets):
            axis = axes[row][column]
            lru = next(one["bytes"] for one in at["tuning"] if one["family"] == "lru")
            for family, (label, colour, marker) in _FAMILIES.items():
                points = sorted(
                    (one["bytes"] / lru, 100 * one["loss"]["value"])
                    for one in at["tuning"]
                    if one["family"] == family
                )
                axis.plot(
                    *zip(*points, strict=True),
                    marker=marker,
                    color=colour,
                    label=label,
                    linewidth=1,
                    markersize=9 if family == "crisp" else 4.5,
                    linestyle="-" if len(points) > 1 else "none",
                )
            axis.set_title(f"{model['facts']['name']}, budget {at['budget']}", fontsize=10)
            axis.set_ylim(-0.5, 12)
            axis.set_xlim(0, 1.05)
            axis.grid(alpha=0.25)
            if row == len(models) - 1:
                axis.set_xlabel("bytes a token, over those of lru")
            if not column:
                axis.set_ylabel("loss of perplexity, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png", metadata={"Software": None})
    plt.close(figure)
