"""Pairs: what a policy takes beside another at the same other settings, sequence by sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from crisp.errors import CrispError
from crisp.sim.sweep.results import Sequences
from crisp.statistics import Estimate, Floats, estimate

BYTES, NS = "bytes", "ns"


@dataclass(frozen=True)
class PairedRatios:
    """Ratios to a baseline, each with its interval: percentiles over resampled sequences.

    A token's bytes and a token's time. None: the baseline loads nothing.
    """

    bytes_per_token: Estimate | None
    ms_per_token: Estimate | None


def paired_ratios(policy: Sequences, baseline: Sequences, seed: int = 0) -> PairedRatios:
    """Compare two runs of the same sequences; CrispError if they are of others.

    Tokens are the same, so a ratio of sums is the ratio of means. Both sums of a sequence are drawn
    together.
    """
    for name in ("sequence", "tokens"):
        if policy[name] != baseline[name]:
            raise CrispError("pairs: the two runs are not of the same sequences")
    return PairedRatios(_ratio(policy, baseline, BYTES, seed), _ratio(policy, baseline, NS, seed))


def _ratio(policy: Sequences, baseline: Sequences, what: str, seed: int) -> Estimate | None:
    sums = np.array([policy[what], baseline[what]], np.float64).T
    return estimate(sums, _quotient, seed) if sums[:, 1].any() else None


def _quotient(sums: Floats) -> Floats:
    """Divide the sums [..., (policy, baseline)] -> [...]."""
    return sums[..., 0] / sums[..., 1]
