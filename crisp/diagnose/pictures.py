"""The pictures of a diagnosis: loads against memory, by their cause, and what would change them.

Colours are of the palette by Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from crisp.diagnose.diagnosis import FIRST_USES, POLICY, WORKING_SET, LogDiagnosis

MIB = 1 << 20
_LINES = [
    ("#0072B2", "o", "-"),
    ("#000000", ".", ":"),
    ("#56B4E9", "v", "-"),
    ("#E69F00", "D", "-"),
    ("#009E73", "P", "-"),
    ("#CC79A7", "X", "-"),
]
_CAUSES = {FIRST_USES: "#BBBBBB", WORKING_SET: "#E69F00", POLICY: "#0072B2"}
_KINDS = {"cache": "#0072B2", "memory": "#E69F00", "width": "#009E73"}


def draw_curves(found: LogDiagnosis) -> str:
    """Return bytes of a token against the budget, by rule, as SVG."""
    with _figure((7.2, 4.2)) as (figure, out):
        axes = figure.add_subplot()
        for (name, points), (colour, marker, style) in zip(
            found.curves.items(), _LINES, strict=False
        ):
            label = f"{name} (its rule)" if name == found.contract.name else name
            axes.plot(
                [size / MIB for size, _ in points],
                [each / MIB for _, each in points],
                style,
                color=colour,
                marker=marker,
                ms=4.5,
                label=label,
            )
        axes.axvline(found.budget_bytes / MIB, color="#777777", lw=0.8, ls="--")
        axes.annotate(
            "the budget",
            (found.budget_bytes / MIB, 0.98),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color="#555555",
        )
        _budget_axis(axes)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("loads of a decoded token (MiB)")
        _tidy(axes)
        axes.legend(frameon=False, fontsize=8.5)
    return out.getvalue()


def draw_causes(found: LogDiagnosis) -> str:
    """Return the loads of a token by their cause, against the budget, as SVG."""
    own, best = found.curves[found.contract.name], found.curves["best"]
    sizes = [size / MIB for size, _ in own]
    first = [min(found.first_use_bytes, each) / MIB for _, each in own]
    fits = [
        min(max(b, found.first_use_bytes), o) / MIB
        for (_, b), (_, o) in zip(best, own, strict=True)
    ]
    with _figure((7.2, 3.6)) as (figure, out):
        axes = figure.add_subplot()
        bottoms = [[0.0] * len(first), first, fits]
        tops = [first, fits, [each / MIB for _, each in own]]
        for (cause, colour), low, high in zip(_CAUSES.items(), bottoms, tops, strict=True):
            axes.fill_between(sizes, low, high, color=colour, lw=0, label=cause, alpha=0.85)
        axes.axvline(found.budget_bytes / MIB, color="#333333", lw=0.8, ls="--")
        _budget_axis(axes)
        axes.set_xlim(sizes[0], sizes[-1])
        axes.set_ylim(bottom=0)
        axes.set_ylabel("loads of a decoded token (MiB)")
        _tidy(axes)
        handles, names = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], names[::-1], frameon=False, fontsize=8.5)
    return out.getvalue()


def draw_settings(found: LogDiagnosis) -> str:
    """Return what each setting would load, beside the engine's rule, as SVG."""
    shown = sorted(found.settings, key=lambda one: one.cost.bytes_per_token, reverse=True)
    with _figure((7.2, 0.9 + 0.24 * len(shown))) as (figure, out):
        axes = figure.add_subplot()
        for place, setting in enumerate(shown):
            star = " *" if setting.loses_quality else ""
            size = setting.cost.bytes_per_token / MIB
            axes.barh(place, size, height=0.72, color=_KINDS[setting.kind])
            axes.text(size, place, f" {size:,.0f}", va="center", fontsize=7.5)
            axes.text(0, place, f"{setting.name}{star}  ", va="center", ha="right", fontsize=8)
        axes.axvline(found.own.bytes_per_token / MIB, color="#333333", lw=0.9, ls="--")
        axes.text(
            found.own.bytes_per_token / MIB, len(shown) - 0.3, "its rule", fontsize=8, ha="center"
        )
        axes.set_yticks([])
        axes.set_xlabel("loads of a decoded token (MiB); * loses quality")
        _tidy(axes)
        from matplotlib.patches import Patch

        patches = [Patch(color=colour, label=kind) for kind, colour in _KINDS.items()]
        axes.legend(handles=patches, frameon=False, fontsize=8, loc="upper right")
    return out.getvalue()


@contextmanager
def _figure(size: tuple[float, float]) -> Iterator[tuple[Any, io.StringIO]]:
    """Yield a figure, and where its SVG stands when the block has ended."""
    import matplotlib
    from matplotlib.figure import Figure

    out = io.StringIO()
    # the same diagnosis gives the same bytes: no date, no random identifiers
    with matplotlib.rc_context({"svg.hashsalt": "crisp", "svg.fonttype": "none"}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure, out
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})


def _budget_axis(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("memory for routed experts (MiB, log)")


def _tidy(axes: Any) -> None:
    axes.grid(axis="both", color="#E5E5E5", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
