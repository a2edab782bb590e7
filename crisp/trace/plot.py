"""The picture of a trace: how unequally its combinations are used (the paper's Figure 3)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from crisp.errors import CrispError
from crisp.files import atomic
from crisp.trace.describe import Counts, Description, pair_shares

_FEW = 150  # more combinations than these are drawn as one area, not as bars
_TIERS = ("HOT", "WARM", "COLD")
_SHADES = ("#fbe3cd", "#fdf4e3", "#eef2f6")
_BARS, _CURVE = "#3b6ea5", "#b5452c"


def draw_combinations(path: Path, name: str, described: Description, counts: Counts) -> None:
    """Draw the combinations' shares of activations, most frequent first, and their running sum.

    Every MoE layer is sorted on its own; lines and bars are means over layers, bands reach from the
    least to the greatest layer, tiers end where they do on average. name: of the trace. Raises
    CrispError for top-1 routing, which has no combinations.
    """
    from matplotlib.figure import Figure  # slow to import, and only pictures need it

    layers = [layer for layer in described.layers if layer.tier_combinations]
    if not layers:
        raise CrispError(f"--plot {path}: top-1 routing has no combinations to draw")
    n = described.combinations
    shares = np.array([pair_shares(counts, layer.layer) for layer in layers]) * 100  # [layers, n]
    running = np.hstack([np.zeros((len(shares), 1)), shares.cumsum(axis=1)])
    edges = np.linspace(0, 100, n + 1)  # of the combinations, in percent of them
    ends = 100 * np.cumsum([layer.tier_combinations for layer in layers], axis=1).mean(axis=0)
    shown = min(100.0, 105 * (shares > 0).any(axis=0).sum() / n)  # what no layer uses is left out

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    bars = figure.add_subplot()
    curve = bars.twinx()
    for tier, shade, start, end in zip(_TIERS, _SHADES, (0, *ends[:2]), ends, strict=True):
        bars.axvspan(start, end, color=shade, linewidth=0)
        if min(end, shown) - start > shown / 12:  # room for its name
            centre, high = (start + min(end, shown)) / 2, bars.get_xaxis_transform()
            bars.text(centre, 1.02, tier, transform=high, ha="center", color="#555555")
    mean, least, most = shares.mean(axis=0), shares.min(axis=0), shares.max(axis=0)
    if n <= _FEW:
        bars.bar(
            (edges[1:] + edges[:-1]) / 2,
            mean,
            width=80 / n,
            color=_BARS,
            yerr=np.clip([mean - least, most - mean], 0, None),
            error_kw={"ecolor": "#1d3b5a", "elinewidth": 0.8, "capsize": 1.5},
        )
    else:
        bars.stairs(mean, edges, fill=True, color=_BARS)
    for share in ("alpha", "beta"):
        curve.axhline(100 * described.tiers[share], color=_CURVE, linewidth=0.7, linestyle=":")
    curve.fill_between(edges, running.min(axis=0), running.max(axis=0), color=_CURVE, alpha=0.15)
    curve.plot(edges, running.mean(axis=0), color=_CURVE)
    bars.set(xlim=(0, shown), ylim=(0, None))
    bars.set_xlabel(f"combinations, most frequent first (% of the {n:,} possible)")
    bars.set_ylabel("share of activations (%)", color=_BARS)
    curve.set(ylim=(0, 100))
    curve.set_ylabel("running sum (%)", color=_CURVE)
    model, origin = described.header["model"] or "an unnamed model", described.header["origin"]
    source = "drawn from statistics of" if origin == "synthetic" else f"{origin} from"
    title = f"{name}: {described.rows:,} tokens, {source} {model}"
    bars.set_title(f"{title}\nmean and range over its MoE layers", pad=18, fontsize=10)
    with atomic(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=160)
