"""What the pictures share: figures, colours, and the paper's points.

Colours are of the palette by Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from crisp.files import atomic

COLOURS = {"FO": "#777777", "UP": "#E69F00", "MO": "#56B4E9", "CRISP": "#0072B2"}
BLUE, SKY, ORANGE, GREEN, PINK, GREY = (
    "#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#777777",
)  # fmt: skip
MODELS = {"tiny-mixtral": BLUE, "tiny-deepseek": SKY}
_DPI, _PAPER = 100, "#D55E00"  # what the paper prints is drawn in this colour, as diamonds


@contextmanager
def figure_file(
    target: Path,
    panels: int,
    title: str,
    note: str,
    size: tuple[float, float] = (4.6, 3.6),
    rows: int = 1,
) -> Iterator[Sequence[Any]]:
    """Yield axes side by side, in rows; write the file when the block ends.

    size: of a panel, inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    whole = size[0] * panels, size[1] * rows + 0.5
    drawn = Figure(figsize=whole, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(rows, panels, squeeze=False).ravel().tolist()
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
    yield axes
    drawn.suptitle(title, x=0.01, ha="left", fontsize=10.5)
    drawn.supxlabel(note, fontsize=7.5, color="#444444", x=0.01, ha="left")
    with atomic(target) as temporary:
        drawn.savefig(temporary, format="png")


def mark_paper(
    ax: Any, x: Any, y: Any, label: str | None = "the paper", edge: str = _PAPER
) -> None:
    """Draw points that the paper prints: diamonds over whatever is drawn."""
    ax.plot(
        x, y, "D", ms=7, mfc="white", mec=edge, mew=1.8, label=label, zorder=5, clip_on=False
    )  # fmt: skip


def draw_bars(
    ax: Any,
    groups: Sequence[str],
    series: Mapping[str, tuple[Sequence[float], str]],
    room: float = 0.8,
) -> dict[str, Any]:
    """Draw bars side by side in each group; return the places of each series.

    series: name -> (heights, colour).
    """
    places, width = {}, room / len(series)
    for i, (name, (heights, colour)) in enumerate(series.items()):
        x = np.arange(len(groups)) + (i - (len(series) - 1) / 2) * width
        ax.bar(x, heights, width * 0.92, color=colour, label=name)
        places[name] = x
    ax.set_xticks(range(len(groups)), groups)
    return places


def draw_legend(ax: Any, **where: Any) -> None:
    """Draw a small legend without a frame."""
    ax.legend(frameon=False, fontsize=8, **where)


def set_titles(ax: Any, title: str, y: str, x: str = "") -> None:
    """Set a panel's title and the labels of its axes."""
    ax.set_title(title, loc="left", fontsize=9)
    ax.set_ylabel(y, fontsize=8.5)
    ax.set_xlabel(x, fontsize=8.5)
