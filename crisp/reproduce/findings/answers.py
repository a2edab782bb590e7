"""The findings of all claims, in one table of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from crisp.reproduce.claims import Claim, claims
from crisp.reproduce.evidence import GPU, ORIN, Evidence
from crisp.reproduce.findings import on_machines, on_paper, on_speed
from crisp.reproduce.findings.on_paper import Answer
from crisp.reproduce.findings.small import format_figures, format_outcomes
from crisp.reproduce.verdict import Finding, PartFigures

ANSWERS: Mapping[str, Callable[[Evidence], Answer]] = {
    **{
        claim: on_machines.layer_part(claim, pick)
        for claim, pick in on_machines.LAYER_PARTS.items()
    },
    "T1.total": on_paper.layer_total,
    "F3.top25": on_paper.skew("F3.top25", "top"),
    "F3.bottom29": on_paper.skew("F3.bottom29", "bottom"),
    "F5.io.full": on_paper.expert("F5.io.full", lambda costs: costs.load),
    "F5.comp.full": on_paper.expert("F5.comp.full", lambda costs: costs.compute),
    "F5.io.half": on_paper.half("F5.io.half"),
    "F5.comp.half": on_paper.half("F5.comp.half"),
    "S2.3.naive": on_paper.idle,
    "S2.3.ideal": on_paper.idle_overlapped,
    "S3.3.combos": on_paper.tiers("S3.3.combos", "A4.combos"),
    "A4.combos": on_paper.tiers("A4.combos", "S3.3.combos"),
    "S3.3.access": on_paper.access,
    "F9.acc40": on_paper.accuracy,
    "F9.lat40": on_speed.token_times,
    "F10.10": on_speed.throughput("F10.10", 10),
    "F10.30": on_speed.throughput("F10.30", 30),
    "F10.50": on_speed.speed_up("F10.50", 50),
    "F10.most": on_speed.speed_up("F10.most", 10),
    "F11.4090": on_speed.on_gpu,
    "F11.4090.energy": on_machines.energy("F11.4090.energy", GPU),
    "F11.orin": on_machines.orin,
    "F11.orin.energy": on_machines.energy("F11.orin.energy", ORIN),
    "F12.mixtral": on_paper.neurons,
    "F13.ppl": on_paper.policies,
    "F13.io": on_paper.volume,
    "F14.tps": on_speed.orders,
    "F14.gain": on_speed.gain,
    "F14.overlap": on_speed.overlap,
    "F15.cold": on_paper.cold,
    "F17.length": on_speed.length,
    "T2.total": on_machines.preparation,
    "T2.meta": on_machines.metadata,
    "T3.mixtral": on_machines.deciding("T3.mixtral", "mixtral-8x7b"),
    "T3.deepseek": on_machines.deciding("T3.deepseek", "deepseek-moe-16b"),
    "T4.io": on_paper.warm_volume,
}


def findings(evidence: Evidence) -> list[Finding]:
    """Return the findings of all claims, in the order of the paper."""
    return [_finding(claim, evidence) for claim in claims().values()]


def _finding(claim: Claim, evidence: Evidence) -> Finding:
    figures, how = ANSWERS[claim.id](evidence) if claim.id in ANSWERS else ({}, "")
    assert figures.keys() <= claim.values.keys(), claim.id
    parts = {part: figures.get(part, PartFigures()) for part in claim.values}
    return Finding(claim, parts, how, format_figures(claim), format_outcomes(claim))
