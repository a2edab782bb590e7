"""What a rule reads: hits, bytes and time of a decoded token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crisp.diagnose.replay import Replayed
from crisp.hardware.cost import half_up
from crisp.hardware.profile import HardwareProfile, cost_model
from crisp.model.spec import ModelSpec

Ints = npt.NDArray[np.int64]
LoadTime = Callable[[int], int]
"""Bytes of one load -> ns."""


@dataclass(frozen=True, eq=False)
class Reads:
    """The lookups of a run's calls, the hits among them, and what the others read: [calls] each."""

    lookups: Ints
    hits: Ints
    n_bytes: Ints
    requests: Ints
    token: npt.NDArray[np.int32]  # the decoded token of each call; -1 of a prompt

    @classmethod
    def of(cls, replayed: Replayed, aligned: int = 0) -> Reads:
        """Return the reads of a replayed rule; aligned: bytes that each miss reads besides."""
        lookups, hits = replayed.per_call().T
        n_bytes = replayed.read_bytes(aligned)
        return cls(lookups, hits, n_bytes, lookups - hits, replayed.calls.token)


@dataclass(frozen=True)
class Cost:
    """What a decoded token costs on average."""

    hit_rate: float  # of all lookups so far, those of prompts too
    decode_hit_rate: float  # of decoded tokens alone
    bytes_per_token: float
    loads_per_token: float
    load_ms_per_token: float | None  # the time of the loads, one after the other; None: not known


def cost_of(reads: Reads, load_time: LoadTime | None) -> Cost:
    """Return what a decoded token costs; where none was decoded, the mean over all calls' tokens.

    load_time: of the machine; None where none was named.
    """
    decoded = reads.token >= 0
    if not decoded.any():
        decoded = np.ones_like(decoded)
    tokens = int(reads.token.max()) + 1 or 1
    time = None
    if load_time is not None:
        pairs = zip(reads.n_bytes[decoded].tolist(), reads.requests[decoded].tolist(), strict=True)
        time = sum(n * load_time(size // n) for size, n in pairs if n) / tokens / 1e6
    return Cost(
        _share(reads.hits, reads.lookups),
        _share(reads.hits[decoded], reads.lookups[decoded]),
        float(reads.n_bytes[decoded].sum()) / tokens,
        float(reads.requests[decoded].sum()) / tokens,
        time,
    )


def load_time_of(profile: HardwareProfile, spec: ModelSpec) -> LoadTime:
    """Return the time of one load on a machine, at the link's own speed.

    Profiles that give the time of one expert (model ``table``) are asked for experts of ``spec``.
    """
    tables = profile.tables
    if tables is not None:
        return lambda n_bytes: half_up(tables.load(n_bytes))
    return cost_model(profile, spec).load


def _share(part: Ints, whole: Ints) -> float:
    return float(part.sum() / max(1, whole.sum()))
