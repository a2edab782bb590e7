"""How near a straight line through the first half of a run's tokens comes on the second half."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.logs.published import MIB, Metrics

Floats = npt.NDArray[np.float64]


def time_fits(metrics: Metrics) -> dict[str, dict[str, float]]:
    """Return how the first half of the tokens foretells the second, in ms of a token.

    A token's time is waiting (stall and management) and computing, with nothing beside. Waiting is
    fitted by least squares as base + slope x MiB read, computing is taken as its mean. ``error`` is
    the second half's mean over what was foretold, less 1; ``typical`` the median error of a token.
    """
    mib = metrics.read_bytes / MIB
    waiting = metrics.stall_ms + metrics.management_ms
    half = len(mib) // 2
    base, slope = _line(mib[:half], waiting[:half])
    whole = _line(mib, waiting)
    wait = base + slope * mib[half:]
    compute = np.full(len(mib) - half, metrics.compute_ms[:half].mean())
    return {
        "waiting": _compare(waiting, wait)
        | {
            "base_ms": base,
            "ms_per_mib": slope,
            "whole_base_ms": whole[0],
            "whole_slope": whole[1],
        },
        "computing": _compare(metrics.compute_ms, compute),
        "all": _compare(metrics.wall_ms, wait + compute),
    }


def _line(mib: Floats, ms: Floats) -> tuple[float, float]:
    """Return (base, slope) of the line of least squares."""
    (base, slope), *_ = np.linalg.lstsq(np.stack([np.ones(len(mib)), mib], axis=1), ms, rcond=None)
    return float(base), float(slope)


def _compare(ms: Floats, foretold: Floats) -> dict[str, float]:
    half = len(ms) - len(foretold)
    return {
        "first_ms": float(ms[:half].mean()),
        "foretold_ms": float(foretold.mean()),
        "second_ms": float(ms[half:].mean()),
        "error": float(ms[half:].mean() / foretold.mean() - 1),
        "typical": float(np.median(np.abs(foretold / ms[half:] - 1))),
    }
