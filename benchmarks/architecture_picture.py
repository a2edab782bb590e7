"""Draw docs/images/architecture.png: the way of one token through one layer.

The numbers in the picture are those of the walk in docs/architecture.md. Colours are those of
`crisp.report.plots`: blue loads, orange computes, grey is the router and attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

LOAD, COMPUTE, LAYER = "#0072B2", "#E69F00", "#BBBBBB"
DECIDES, SIMULATES, RUNS = "#F3F3F3", "#E6F2FA", "#FDF3DF"  # backgrounds of crisp, sim and hw
INK, SMALL = "#222222", "#444444"
TARGET = Path(__file__).parents[1] / "docs/images/architecture.png"


class Picture:
    """A canvas of 100 by 66 units, with the shapes that the picture is made of."""

    def __init__(self) -> None:
        self.figure = Figure(figsize=(11, 7.26), dpi=150)
        FigureCanvasAgg(self.figure)
        self.axes: Any = self.figure.add_axes((0, 0, 1, 1), xlim=(0, 100), ylim=(0, 66))
        self.axes.set_axis_off()

    def room(self, x: float, y: float, width: float, height: float, colour: str, name: str) -> None:
        """Draw the background of a package, with its name in the upper left corner."""
        self._box(x, y, width, height, colour, "none")
        self.axes.text(x + 1, y + height - 1, name, va="top", fontsize=10, color=SMALL)

    def box(self, x: float, y: float, width: float, height: float, title: str, text: str) -> None:
        """Draw a box with a title and what it does below."""
        self._box(x, y, width, height, "white", "#777777")
        middle, top = x + width / 2, y + height - 0.9
        self.axes.text(middle, top, title, ha="center", va="top", fontsize=9.5, weight="bold")
        self.axes.text(
            middle, top - 2.3, text, ha="center", va="top", fontsize=8.5, color=INK, linespacing=1.3
        )

    def arrow(self, *ends: tuple[float, float], text: str = "", side: str = "right") -> None:
        """Draw an arrow between two points, with a text beside its middle."""
        (x0, y0), (x1, y1) = ends
        self.axes.add_patch(
            FancyArrowPatch(
                *ends, arrowstyle="-|>", mutation_scale=12, color=INK, lw=1.2, shrinkA=0, shrinkB=0
            )
        )
        shift = 2 if side == "right" else -2
        align = "left" if side == "right" else "right"
        place = (x0 + x1) / 2 + shift, (y0 + y1) / 2
        self.axes.text(*place, text, ha=align, va="center", fontsize=8.5, family="monospace")

    def number(self, x: float, y: float, number: int) -> None:
        """Draw the number of a step of the walk."""
        self.axes.add_patch(Circle((x, y), 1.25, color=INK, zorder=3))
        white = {"color": "white", "ha": "center", "va": "center_baseline", "zorder": 4}
        self.axes.text(x, y, str(number), fontsize=9, weight="bold", **white)

    def streams(self, x: float, y: float, link: str, compute: str) -> None:
        """Draw the two streams at work: two loads, and computations that overlap with them."""
        for lane, name, text, step in ((4, "link", link, 6), (0, "compute", compute, 7)):
            middle = y + lane + 1.5
            self.number(x - 8.5, middle, step)
            self.axes.text(x - 1, middle, name, ha="right", va="center", fontsize=8.5)
            self.axes.text(x + 20, middle, text, va="center", fontsize=8.5, linespacing=1.2)
        bars = [(0, 3, 0, LAYER, ""), (3, 6, 4, LOAD, "E5"), (9, 6, 4, LOAD, "E2")]
        bars += [(9, 4, 0, COMPUTE, "E5"), (15, 4, 0, COMPUTE, "E2")]
        for start, length, lane, colour, text in bars:
            left, middle = x + start, y + lane + 1.5
            self.axes.barh(middle, length, 2.8, left, color=colour, edgecolor="white", lw=1)
            ink = "white" if colour == LOAD else "black"
            self.axes.text(
                left + length / 2, middle, text, ha="center", va="center", fontsize=8, color=ink
            )

    def legend(self, x: float, y: float) -> None:
        """Say what the bars are."""
        names = {LAYER: "router, attention", LOAD: "load an expert", COMPUTE: "compute it"}
        for line, (colour, name) in enumerate(names.items()):
            self.axes.barh(y - 2.4 * line, 2.4, 1.5, x, color=colour)
            self.axes.text(x + 3.2, y - 2.4 * line, name, va="center", fontsize=8.5)

    def _box(self, x: float, y: float, width: float, height: float, face: str, edge: str) -> None:
        style = "round,pad=0,rounding_size=0.8"
        self.axes.add_patch(
            FancyBboxPatch((x, y), width, height, boxstyle=style, fc=face, ec=edge, lw=1)
        )


def main() -> None:
    """Draw the picture and write it."""
    picture = Picture()
    title = "One token in one layer: the same decisions drive the simulation and the hardware"
    picture.axes.text(1.5, 64.3, title, va="center", fontsize=12.5, weight="bold")

    picture.box(2.5, 48.5, 16, 8.6, "routing", "of a trace, or of the\nmodel while it writes")
    picture.number(2.5, 57.1, 1)
    picture.legend(2.5, 41.5)

    picture.room(21.5, 30, 77, 31.5, DECIDES, "crisp/ decides; it knows no clock and no device")
    picture.box(
        24, 48.5, 33, 8.6, "widths", "how many leading blocks of each\nexpert this token needs"
    )
    picture.box(
        63, 48.5, 33, 8.6, "tasks", "each expert once, loaded at the\nwidest width that is needed"
    )
    picture.box(24, 31.5, 72, 13.2, "", "")
    picture.axes.text(25.5, 40.9, "EventScheduler", va="center", fontsize=9.5, weight="bold")
    says = "what to load, to\nevict and to\ncompute next"
    picture.axes.text(25.5, 36.3, says, va="center", fontsize=8.5, linespacing=1.3)
    picture.box(40.5, 33, 17, 8.4, "order", "which task\ncomes first")
    picture.box(59, 33, 17, 8.4, "cache", "which expert\nis the victim")
    picture.box(77.5, 33, 17, 8.4, "prefetcher", "what the next\nlayer may need")
    picture.arrow((18.5, 52.8), (24, 52.8))
    picture.arrow((57, 52.8), (63, 52.8))
    picture.arrow((79.5, 48.5), (79.5, 44.7))
    for x, y, step in ((24, 57.1, 2), (63, 57.1, 3), (24, 44.7, 4)):
        picture.number(x, y, step)

    picture.room(
        1.5, 10, 47.5, 13.5, SIMULATES, "sim/ counts time: a cost for every load and computation"
    )
    picture.streams(12.5, 11.2, "bytes over\nbandwidth", "FLOPs and bytes\nover rates")
    picture.room(51, 10, 47.5, 13.5, RUNS, "hw/ works: a device that reads and multiplies")
    picture.streams(62, 11.2, "blocks read from\nthe expert store", "blocks times\nactivations")
    for x in (26, 62):
        picture.arrow((x, 31.5), (x, 23.5), text="next_load()\nnext_compute()", side="left")
        picture.arrow((x + 6, 23.5), (x + 6, 31.5), text="loaded()\ncomputed()")
        picture.number(x, 27.5, 5)
        picture.number(x + 6, 27.5, 8)

    picture.box(33, 1, 34, 5.8, "Run: metrics and timeline", "one format for both")
    picture.number(33, 6.8, 9)
    picture.arrow((36, 10), (43, 6.8))
    picture.arrow((64, 10), (57, 6.8))
    picture.arrow((67, 2.6), (71.5, 2.6))
    picture.axes.text(72, 2.6, "crisp explain, report, compare", fontsize=8.5, va="center")
    picture.figure.savefig(TARGET)


if __name__ == "__main__":
    main()
