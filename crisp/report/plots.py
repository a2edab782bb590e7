"""Pictures of runs: timelines as Gantt charts, throughput against budget.

Colours are of the palette by Okabe and Ito, which colour-blind readers can tell apart; lines also
differ in their markers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from crisp.errors import CrispError
from crisp.files import atomic
from crisp.run.timeline import (
    BLOCKS,
    COMPUTE,
    END,
    EVENT,
    EXPERT,
    KIND,
    LAYER,
    LAYER_ID,
    LOAD,
    PREFETCH,
    START,
    Rows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "pdf", "svg")
_COLOURS = {LAYER: "#BBBBBB", COMPUTE: "#E69F00", LOAD: "#0072B2", PREFETCH: "#56B4E9"}
_LEGEND = {
    LOAD: "load",
    PREFETCH: "prefetch",
    COMPUTE: "compute an expert",
    LAYER: "router, attention",
}
_LINES = [
    ("#555555", "s"),
    ("#0072B2", "o"),
    ("#56B4E9", "v"),
    ("#E69F00", "D"),
    ("#D55E00", "^"),
    ("#009E73", "P"),
    ("#CC79A7", "X"),
]
_MAX_BARS, _MAX_EVENTS = 90, 8
_CHARACTER = 0.0065  # its width, of the width of the picture


class Label(NamedTuple):
    """A label on bars: an expert, and how many of its blocks they load or compute."""

    expert: int
    blocks: int

    def text(self, n_blocks: int) -> str:
        """Return E5, or E5 4/8 for a part of it; n_blocks: of a whole expert."""
        return f"E{self.expert}" + (f" {self.blocks}/{n_blocks}" if self.blocks < n_blocks else "")


class Line(NamedTuple):
    """A line of a throughput chart: one policy, or a bound."""

    name: str
    budgets: Sequence[float]  # shares of all routed experts, 0 to 1
    speeds: Sequence[float]  # tokens/s
    style: str = "-"  # as matplotlib spells it; ":" is a bound and has no marks


def select_first_events(rows: Rows) -> Rows:
    """Return the first events in ``rows``: as many as fit in one picture, at least one."""
    in_events = rows[rows[:, EVENT] >= 0]
    if not len(in_events):
        return rows
    events = np.unique(in_events[:, EVENT])[:_MAX_EVENTS]
    bars = np.searchsorted(np.sort(in_events[:, EVENT]), events, side="right")
    last = events[max(0, int((bars <= _MAX_BARS).sum()) - 1)]
    stop = in_events[in_events[:, EVENT] == last][:, END].max()
    shown: Rows = rows[rows[:, START] < stop]
    return shown


def draw_gantt(
    target: Path | IO[bytes], timelines: Mapping[str, Rows], n_blocks: int, title: str, note: str
) -> None:
    """Draw timelines below each other on one axis of time, each from its own begin.

    timelines: rows by their name; n_blocks: of a whole expert; note: small print below, to which
    the meaning of a label is added.
    """
    from matplotlib.patches import Patch

    with _figure(target, (11, 1.3 + 1.25 * len(timelines))) as figure:
        axes = figure.add_subplot()
        longest = max(int(_until(rows) - _since(rows)) for rows in timelines.values()) / 1e6
        places: list[float] = []
        names: list[str] = []
        labels: list[Label] = []
        for place, (name, rows) in enumerate(timelines.items()):
            link, compute = -3.0 * place, -3.0 * place - 1
            _draw_rows(axes, rows, (link, compute), longest)
            for lane, kinds in ((link, (LOAD, PREFETCH)), (compute, (COMPUTE,))):
                in_lane = rows[np.isin(rows[:, KIND], kinds)]
                labels += _label_rows(axes, in_lane, lane, _since(rows), longest, n_blocks)
            places += [link, compute]
            names += ["link", "compute"]
            took = (_until(rows) - _since(rows)) / 1e6
            axes.text(0, link + 0.95, f"{name}: {took:.2f} ms", fontsize=10, fontweight="bold")
        axes.set_yticks(places, names)
        axes.set_ylim(min(places) - 0.6, 1.3)
        axes.set_xlim(0, longest * 1.005)
        axes.set_xlabel("ms")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        kinds_drawn = set(np.concatenate([rows[:, KIND] for rows in timelines.values()]).tolist())
        patches = [Patch(color=_COLOURS[k], label=_LEGEND[k]) for k in _LEGEND if k in kinds_drawn]
        figure.legend(handles=patches, ncols=len(patches), frameon=False, loc="outside upper right")
        axes.set_title(title, loc="left", fontsize=11)
        small = f"{note} {_explain_labels(labels, n_blocks)}".strip()
        figure.supxlabel(small, fontsize=8, color="#444444", x=0.01, ha="left")


def draw_throughput(
    target: Path | IO[bytes], panels: Mapping[str, Sequence[Line]], title: str, note: str
) -> None:
    """Draw tokens/s against the budget, a panel for each machine, a line for each policy."""
    from matplotlib.ticker import LogLocator, NullLocator

    with _figure(target, (0.8 + 5.2 * len(panels), 4.6)) as figure:
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for ax, (machine, lines) in zip(axes, panels.items(), strict=True):
            for line, (colour, marker) in zip(lines, _LINES, strict=False):
                percents = [100 * share for share in line.budgets]
                bound = line.style == ":"
                how = {"color": "black"} if bound else {"color": colour, "marker": marker}
                ax.plot(percents, line.speeds, line.style, label=line.name, **how)
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.set_title(machine, loc="left", fontsize=10)
            ax.set_xlabel("memory for routed experts (% of all of them)")
            ax.set_xlim(left=0)
            ax.grid(axis="y", color="#E5E5E5", linewidth=0.6)
            ax.spines[["top", "right"]].set_visible(False)
            ax.yaxis.set_major_formatter("{x:g}")
        axes[0].set_ylabel("tokens/s (log)")
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, frameon=False, loc="outside right upper")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.supxlabel(note, fontsize=8, color="#444444", x=0.01, ha="left")


def check_format(path: Path) -> None:
    """Raise CrispError unless the name ends in a format that can be drawn."""
    if path.suffix.lower().removeprefix(".") not in FORMATS:
        raise CrispError(f"{path}: expected a name that ends in .png, .pdf or .svg")


def _draw_rows(axes: Axes, rows: Rows, lanes: tuple[float, float], longest: float) -> None:
    """Draw a timeline's bars on the lanes of its link and its compute stream."""
    link, compute = lanes
    since = _since(rows)
    labelled = -longest
    for row in rows.tolist():
        kind = row[KIND]
        lane = link if kind in (LOAD, PREFETCH) else compute
        start = max(0.0, (row[START] - since) / 1e6)
        length = (row[END] - since) / 1e6 - start
        edge = "white" if length > 0.004 * longest else _COLOURS[kind]  # else it would hide the bar
        axes.barh(
            lane, length, left=start, height=0.7, color=_COLOURS[kind], edgecolor=edge, lw=0.5
        )
        if kind == LAYER:
            axes.plot([start] * 2, [compute - 0.45, link + 0.5], color="#777777", lw=0.6)
            if start - labelled > 0.02 * longest:  # else the labels would overlap
                labelled = start
                axes.text(start, link + 0.5, f"L{row[LAYER_ID]}", fontsize=7, va="bottom")


def _label_rows(
    axes: Axes, rows: Rows, lane: float, since: int, longest: float, n_blocks: int
) -> list[Label]:
    """Name the experts on a lane where there is room; return the labels that were drawn.

    Bars of the same expert that follow each other have one label together: at granularity block
    there is a bar for each of its loads, and of the pieces that it is computed in.
    """
    drawn = []
    rows = rows[np.argsort(rows[:, START], kind="stable")]
    alike = rows[:, [KIND, EVENT, LAYER_ID, EXPERT]]
    begins = np.flatnonzero((np.diff(alike, axis=0) != 0).any(axis=1)) + 1
    for bars in np.split(rows, begins) if len(rows) else []:
        label = Label(int(bars[0, EXPERT]), int(bars[:, BLOCKS].sum()))
        start = max(0.0, (int(bars[0, START]) - since) / 1e6)
        end = (int(bars[-1, END]) - since) / 1e6
        text = label.text(n_blocks)
        covered = int((bars[:, END] - bars[:, START]).sum()) / 1e6
        if len(text) * _CHARACTER * longest > end - start or covered < (end - start) / 2:
            continue  # it would not fit, or stand between bars
        colour = "white" if bars[0, KIND] == LOAD else "black"
        centre = (start + end) / 2
        axes.text(centre, lane, text, ha="center", va="center", fontsize=7, color=colour)
        drawn.append(label)
    return drawn


def _explain_labels(labels: Sequence[Label], n_blocks: int) -> str:
    """Explain labels by one of them: one of a part of an expert if there is any."""
    if not labels:
        return ""
    label = next((label for label in labels if label.blocks < n_blocks), labels[0])
    part = f", {label.blocks} of its {n_blocks} blocks" if label.blocks < n_blocks else ""
    return f"{label.text(n_blocks)}: expert {label.expert}{part}."


def _since(rows: Rows) -> int:
    """Return when the first interval on compute begins, in ns; a prefetch may have begun before."""
    compute = rows[(rows[:, KIND] == LAYER) | (rows[:, KIND] == COMPUTE)]
    return int(compute[:, START].min())


def _until(rows: Rows) -> int:
    """Return when the last interval ends, in ns."""
    return int(rows[:, END].max())


@contextmanager
def _figure(target: Path | IO[bytes], size: tuple[float, float]) -> Iterator[Any]:
    """Yield a figure that is written when the block ends; no display is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    if isinstance(target, Path):
        with atomic(target) as temporary:
            figure.savefig(temporary, format=target.suffix.removeprefix(".").lower())
    else:
        figure.savefig(target, format="png")
