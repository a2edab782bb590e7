"""Metadata from one kind of text used on another (paper, Figure 16), and how soon it settles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np

from benchmarks.quality.estimates import Figure, Reading, average, blend, contrast, row
from benchmarks.quality.experiments import policy_controls
from benchmarks.quality.setting import KINDS, Orders
from benchmarks.quality.study import TIERED, Study
from crisp.policy.widths.base import Tiered
from crisp.prepare.calibration import CalibrationSums
from crisp.profile import Profile, tiers

SEEDS = (0, 1, 2)
CUTS = Fraction(3, 5), Fraction(9, 10)


def transfers(study: Study) -> Figure:
    """Measure every kind of text with the metadata of every other."""
    sums = {kind: study.calibration([kind]) for kind in KINDS.values()}
    orders = {kind: study.order("importance", sums[kind]) for kind in sums}
    profiles = {kind: _profile(study, sums[kind]) for kind in sums}
    by_weight = {kind: replace(profile, dominant=None) for kind, profile in profiles.items()}
    return {
        "targets": [_onto(study, number, orders, profiles) for number in KINDS],
        "by_weight": [_onto(study, number, orders, by_weight) for number in KINDS]
        if study.pairs
        else None,
        "same_tier": [
            {"a": a, "b": b, "events": _same_tier(profiles[a], profiles[b])}
            for a, b in product(KINDS.values(), repeat=2)
            if a != b
        ],
    }


def _onto(
    study: Study, number: int, orders: Mapping[str, Orders], profiles: Mapping[str, Profile]
) -> Figure:
    """Measure held-out text of kind ``number`` with the metadata of each kind."""
    target = KINDS[number]
    one, full = {0: target}, _first_text(study.full.of_text(number))
    text = study.windows("heldout", [target], study.amounts.heldout)

    def read(order: str, profile: str, width: Any = TIERED) -> Reading:
        return study.read(width, orders[order], profiles[profile], windows=text)

    matched = read(target, target)
    dealt = [read(target, target, policy_controls.DealtTiers(seed, Tiered())) for seed in SEEDS]
    random = [row("tiers at random", reading, full, one) for reading in dealt]
    figures: Figure = {
        "target": target,
        "matched": row("matched", matched, full, one),
        "random": average(random, "tiers at random"),
        "sources": {},
    }
    for source in KINDS.values():
        if source != target:
            moved, renewed = read(source, source), read(source, target)
            figures["sources"][source] = {
                "transferred": row("transferred", moved, full, one),
                "refreshed": row("refreshed", renewed, full, one),
                "loss": contrast(moved, matched, one),
                "refresh": contrast(renewed, moved, one),
                "random": contrast(blend(dealt), moved, one),
            }
    return figures


def settling(study: Study) -> Figure:
    """Measure tiers, roles and perplexity by how many calibration tokens they come from."""
    last, points = study.sums, study.points()
    largest = _profile(study, last)
    rows = []
    for place, upto in enumerate(points):
        sums = study.calibration(upto=upto)
        profile = _profile(study, sums)
        entry: Figure = {
            "tokens": sums.tokens,
            "same_tier": _same_tier(profile, largest),
            "same_role": _same_role(profile, largest),
            "unreached": len(sums.unreached),
        }
        if place % 2 == (len(points) - 1) % 2:  # every other point, and the last
            reading = study.read(TIERED, study.order("importance", sums), profile)
            entry |= row(str(sums.tokens), reading, study.full, KINDS)
        rows.append(entry)
    return {"rows": rows}


def _profile(study: Study, sums: CalibrationSums) -> Profile:
    return study.profile(sums, study.local(sums))


def _first_text(reading: Reading) -> Reading:
    """Return the same scores, as those of text number 0."""
    zero = np.zeros_like(reading.scores.text)
    return replace(reading, scores=replace(reading.scores, text=zero))


def _same_tier(profile: Profile, reference: Profile) -> float:
    """Return the share of ``reference``'s events whose tier is the same in ``profile``."""
    same = tiers(profile, *CUTS) == tiers(reference, *CUTS)
    return _weighted(same, reference)


def _same_role(profile: Profile, reference: Profile) -> float:
    """Return the share of ``reference``'s events with the same dominant expert in ``profile``."""
    assert profile.dominant is not None
    assert reference.dominant is not None
    return _weighted(profile.dominant == reference.dominant, reference)


def _weighted(same: np.ndarray, reference: Profile) -> float:
    return float((reference.pair_counts * same).sum() / reference.pair_counts.sum())
