"""The pictures of the page: a panel for each model. Colours are those of `crisp.report.plots`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from crisp.files import atomic

Figure = dict[str, Any]
_BLUE, _SKY, _ORANGE, _RED, _GREEN, _PINK, _GREY = (
    "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#777777",
)  # fmt: skip
_SMALL = 0.1  # perplexity: below it the axes are linear
_BARS = "95 % intervals over windows"


def policies(target: Path, models: Sequence[Figure]) -> None:
    """Draw what is lost against the bytes touched: the paper's widths, and plain rules."""
    groups = (
        ("one width for all", _GREY, "s", ("all 75 %", "all 50 %")),
        ("single", _PINK, "X", ("single",)),
        ("asymmetric 100 + 50", _ORANGE, "D", ("asymmetric 100 + 50",)),
        ("tiered", _BLUE, "o", ("tiered",)),
        ("tiers at random", _SKY, "v", ("tiered, tiers at random",)),
        ("skip by router weight", _RED, "^", "skip by router weight, "),
        ("block by contribution", _GREEN, "P", "block by contribution, "),
    )
    with _panels(
        target, models, 4.8, "What widths lose, and what they touch", f"{_BARS}, cut at 0.01 %", 2.4
    ) as axes:
        for ax, model in zip(axes, models, strict=True):
            rows = {row["label"]: row for row in model["experiments"]["strategies"]["rows"]}
            weight = [
                row
                for name, row in rows.items()
                if name.endswith("roles by router weight") and "random" not in name
            ]
            for name, colour, marker, which in groups:
                group_rows = [
                    row
                    for label, row in rows.items()
                    if (label in which if isinstance(which, tuple) else label.startswith(which))
                    and not label.endswith("renormalised")
                ]
                _points(ax, group_rows, colour, marker, name)
            _points(ax, weight, _BLUE, "o", "these, heavier expert\ndominant",
                    hollow=True)  # fmt: skip
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.set_xlabel("expert bytes a token (% of full width)")
        axes[0].set_ylabel("increase of perplexity (%, log)")
        _legend(axes)


def orders(target: Path, models: Sequence[Figure]) -> None:
    """Draw bars: the five orders at half of the neurons."""
    with _panels(target, models, 4.2, "Every expert at 50 % of its neurons, in each order",
                 f"{_BARS}; random: the range of three draws") as axes:  # fmt: skip
        for ax, model in zip(axes, models, strict=True):
            rows = model["experiments"]["orders"]["uniform(.5)"]["rows"]
            values = np.array([100 * row["increase"]["value"] for row in rows])
            ends = 100 * np.array([row["increase"]["interval"] for row in rows]).T
            colours = [_BLUE if row["label"] == "importance" else _SKY for row in rows]
            ax.bar(range(len(rows)), values, color=colours, width=0.7)
            ax.errorbar(range(len(rows)), values, np.abs(ends - values), fmt="none",
                        ecolor="black", lw=1, capsize=3)  # fmt: skip
            ax.set_xticks(range(len(rows)), [row["label"] for row in rows])
        axes[0].set_ylabel("increase of perplexity (%)")


def roles(target: Path, models: Sequence[Figure]) -> None:
    """Draw dominant against auxiliary, a point for each of the 20 most frequent combinations."""
    with _panels(target, models, 4.6, "Masking one expert of a combination",
                 f"the 20 most frequent combinations; {_BARS}") as axes:  # fmt: skip
        for ax, model in zip(axes, models, strict=True):
            pairs = model["experiments"]["masking"]["pairs"]
            x, y = (
                np.array([pair[side]["value"] for pair in pairs])
                for side in ("dominant_cost", "auxiliary_cost")
            )
            for side, along in (("dominant_cost", "xerr"), ("auxiliary_cost", "yerr")):
                middle = x if along == "xerr" else y
                ends = np.array([pair[side]["interval"] for pair in pairs]).T
                ax.errorbar(x, y, fmt="none", ecolor="#BBBBBB", lw=0.8,
                            **{along: np.abs(ends - middle)})  # fmt: skip
            ax.plot(x, y, "o", color=_BLUE, ms=5)
            most = 2 * max(x.max(), y.max())
            ax.plot([-_SMALL, most], [-_SMALL, most], "--", color=_GREY, lw=1)
            ax.text(most, most, "equal  ", ha="right", va="center", fontsize=8, color=_GREY)
            for scale in (ax.set_xscale, ax.set_yscale):
                scale("symlog", linthresh=_SMALL)
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_formatter("{x:g}")
            ax.set_xlabel("dominant masked: increase of perplexity (log)")
        axes[0].set_ylabel("auxiliary masked: increase of perplexity (log)")


def shift(target: Path, models: Sequence[Figure]) -> None:
    """Draw matrices: metadata of each kind of text on each kind, with tiers at random beside."""
    from matplotlib.colors import LogNorm

    with _panels(target, models, 4.4, "Increase of perplexity (%) with metadata of other text",
                 "below each figure in brackets: after a refresh") as axes:  # fmt: skip
        for ax, model in zip(axes, models, strict=True):
            targets = model["experiments"]["shift"]["targets"]
            kinds = [target_row["target"] for target_row in targets]
            cells = [[_cell(target_row, source) for target_row in targets] for source in kinds]
            cells.append(
                [(target_row["random"]["increase"]["value"], None) for target_row in targets]
            )
            shown = np.array([[100 * first for first, _ in row] for row in cells])
            scale = LogNorm(max(0.5, shown.min()), 3 * shown.max(), clip=True)
            ax.imshow(np.maximum(shown, 0.5), cmap="Blues", norm=scale, aspect="auto")
            for place, (first, second) in np.ndenumerate(_objects(cells)):
                text = f"{100 * first:.1f}"
                text += "" if second is None else f"\n({100 * second:.1f})"
                text = text.replace("-", "−")
                colour = "white" if scale(100 * first) > 0.6 else "black"
                ax.text(place[1], place[0], text, ha="center", va="center", color=colour)
            ax.set_xticks(range(len(kinds)), kinds)
            ax.set_yticks(range(len(cells)), [*kinds, "tiers\nat random"])
            ax.set_xlabel("used on")
            ax.tick_params(length=0)
            ax.spines[:].set_visible(False)
        axes[0].set_ylabel("metadata of")


PICTURES: dict[str, Callable[[Path, Sequence[Figure]], None]] = {
    "policies": policies,
    "orders": orders,
    "roles": roles,
    "shift": shift,
}


def _cell(target: Figure, source: str) -> tuple[float, float | None]:
    if source == target["target"]:
        return target["matched"]["increase"]["value"], None
    moved = target["sources"][source]
    return tuple(moved[name]["increase"]["value"] for name in ("transferred", "refreshed"))


def _objects(cells: Sequence[Sequence[Any]]) -> Any:
    array = np.empty((len(cells), len(cells[0])), object)
    for i, row in enumerate(cells):
        for j, cell in enumerate(row):
            array[i, j] = cell
    return array


def _points(
    ax: Any, rows: Sequence[Figure], colour: str, marker: str, name: str, hollow: bool = False
) -> None:
    rows = sorted((row for row in rows if row["increase"]["value"] > 0), key=lambda r: r["share"])
    if not rows:
        return
    x = [100 * row["share"] for row in rows]
    y = np.array([100 * row["increase"]["value"] for row in rows])
    ends = np.maximum(100 * np.array([row["increase"]["interval"] for row in rows]).T, 1e-2)
    style = {"markerfacecolor": "white"} if hollow else {}
    line = "none" if hollow else "-"
    ax.errorbar(x, y, np.abs(ends - y), linestyle=line, marker=marker, color=colour, label=name,
                ms=7, lw=1, capsize=2, **style)  # fmt: skip


def _legend(axes: Sequence[Any]) -> None:
    named: dict[str, Any] = {}
    for ax in axes:
        handles, names = ax.get_legend_handles_labels()
        named |= dict(zip(names, handles, strict=True))
    axes[0].figure.legend(
        named.values(), named.keys(), frameon=False, loc="outside right center", fontsize=9
    )


@contextmanager
def _panels(
    target: Path, models: Sequence[Figure], height: float, title: str, note: str, beside: float = 0
) -> Iterator[Any]:
    """Yield axes for each model, side by side; write the file when the block ends.

    beside: inches for a legend.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(
        figsize=(0.8 + beside + 4.8 * len(models), height), dpi=150, layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(models), squeeze=False)[0]
    for ax, model in zip(axes, models, strict=True):
        ax.set_title(model["name"], loc="left", fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    yield axes
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.supxlabel(note, fontsize=8, color="#444444", x=0.01, ha="left")
    with atomic(target) as temporary:
        figure.savefig(temporary, format="png")
