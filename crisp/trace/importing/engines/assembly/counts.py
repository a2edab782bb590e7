"""Counts of experts that a log holds, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.errors import CrispError
from crisp.trace.importing.engines.log import MOST_EXPERTS, MOST_LAYERS, ExpertCounts

_MOST = 1 << 53  # whole numbers up to here are exact in floating point


def count_experts(
    engine: str, values: NDArray[Any], name: str, notes: Sequence[str] = ()
) -> ExpertCounts:
    """Return counts [layers, experts], of whole or floating-point numbers, as what a log holds.

    name: of the log, in errors. Raises CrispError for negative and absurd counts, and for none.
    """
    if values.ndim != 2 or not values.size:
        raise CrispError(f"{name}: counts are {list(values.shape)}; expected [layers, experts]")
    if len(values) > MOST_LAYERS or values.shape[1] > MOST_EXPERTS:
        layers, experts = values.shape
        raise CrispError(f"{name}: counts of {layers:,} layers and {experts:,} experts; impossible")
    if not (np.isfinite(values) & (values >= 0) & (values <= _MOST)).all():
        raise CrispError(f"{name}: a count is negative, absurdly large or no number")
    counts = np.round(values).astype(np.int64)
    if not counts.any():
        raise CrispError(f"{name}: counts nothing")
    return ExpertCounts(engine=engine, counts=counts, notes=tuple(notes))
