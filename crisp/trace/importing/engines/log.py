"""What the log of another engine becomes: a trace, or counts without order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from crisp.errors import CrispError
from crisp.trace import RoutingTrace

MOST_LAYERS = 1 << 14
MOST_EXPERTS = int(np.iinfo(np.int16).max)  # as a trace stores them


class KnownSizes(NamedTuple):
    """The sizes of the model that a log is of, as far as its reader was told them."""

    n_experts: int | None = None  # of a MoE layer
    n_layers: int | None = None  # MoE or not
    top_k: int | None = None


def check_sizes(n_experts: int | None, n_layers: int | None, top_k: int | None) -> None:
    """Raise CrispError for a size that no model has; None is a size that is not known."""
    for option, size, most in (
        ("--experts", n_experts, MOST_EXPERTS),
        ("--layers", n_layers, MOST_LAYERS),
        ("--top-k", top_k, MOST_EXPERTS),
    ):
        if size is not None and not 1 <= size <= most:
            raise CrispError(f"{option} {size}: expected 1 to {most:,}")


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineLog:
    """Routing that an engine logged, as a trace, with what the log says beside it."""

    engine: str  # name as --from takes it
    trace: RoutingTrace  # experts -1 where the log has no record
    expert_bytes: tuple[int, ...] | None = None  # [layers]: of one expert; None: not in the log
    absent: int = 0  # (row, MoE layer)s of the trace without a record
    left_out: int = 0  # rows of the log that are no tokens (padding, cached prefixes, equal ids)
    notes: tuple[str, ...] = ()  # what a user should know, a line each


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertCounts:
    """How often each expert was used: counts without order."""

    engine: str  # name as --from takes it
    counts: NDArray[np.int64]  # [layers, experts]
    notes: tuple[str, ...] = ()  # what a user should know, a line each
