"""Findings about machines that are not at hand: modelled by a profile, or measured on this one."""

from __future__ import annotations

from collections.abc import Callable

from crisp.model.spec import ModelSpec
from crisp.reproduce.arithmetic import TOP_K, PaperCosts
from crisp.reproduce.claims import claims
from crisp.reproduce.evidence import BUDGETS, GPU, ORIN, POLICIES, Evidence, speed_run
from crisp.reproduce.findings.on_paper import Answer, single_answer
from crisp.reproduce.measured import host_figures
from crisp.reproduce.verdict import PartFigures

_PAIR_BYTES = 3  # of an ordered pair: one for its tier, two for its dominant expert
_MODELS = {"Mixtral": "mixtral-8x7b", "DeepSeek-MoE": "deepseek-moe-16b"}
_MINUTES = {"Mixtral": (18, 7, 15, 8), "DeepSeek-MoE": (12, 4, 22, 10)}  # Table 2's rows


def layer_part(claim: str, pick: Callable[[PaperCosts], float]) -> Callable[[Evidence], Answer]:
    """Answer a row of Table 1."""

    def answer(evidence: Evidence) -> Answer:
        how = f"ours: modelled, the profile {GPU}, experts in 4.25 bits"
        return single_answer(claim, how, ours=pick(evidence.gpu))

    return answer


LAYER_PARTS: dict[str, Callable[[PaperCosts], float]] = {
    "T1.load": lambda costs: TOP_K * costs.load,
    "T1.compute": lambda costs: TOP_K * costs.compute,
}


def energy(claim: str, machine: str) -> Callable[[Evidence], Answer]:
    """Answer Figure 11: joules."""

    def answer(evidence: Evidence) -> Answer:
        crisp, full = (
            evidence.joules(speed_run(machine, POLICIES[name], BUDGETS[0]))
            for name in ("CRISP", "FO")
        )
        how = (
            f"ours: modelled, the profile {machine}; its watts while loading come from Figure 11 "
            "itself"
        )
        return {
            "CRISP": PartFigures(crisp),
            "less than FO": PartFigures(100 * (1 - crisp / full)),
        }, how

    return answer


def orin(evidence: Evidence) -> Answer:
    """Answer Figure 11: the Jetson's speed."""
    how = f"ours: modelled, the profile {ORIN}: data sheets, an upper end"
    return single_answer(
        "F11.orin", how, ours=evidence.speed(speed_run(ORIN, POLICIES["CRISP"], BUDGETS[0]))
    )


def preparation(evidence: Evidence) -> Answer:
    """Answer Table 2: its rows add up; its times need the machine."""
    parts = {part: PartFigures(elsewhere=float(sum(rows))) for part, rows in _MINUTES.items()}
    return parts, "the sums of its rows"


def metadata(evidence: Evidence) -> Answer:
    """Answer Appendix A.4.1: the size of the look-up tables."""
    parts = {}
    for part, name in _MODELS.items():
        spec = ModelSpec.named(name)
        parts[part] = PartFigures(_PAIR_BYTES * len(spec.moe_layers) * spec.n_experts**2 / 1e6)
    return parts, "ours: of every ordered pair a byte for its tier, two for its dominant expert"


def deciding(claim: str, model: str) -> Callable[[Evidence], Answer]:
    """Answer Table 3: the time the host spends."""

    def answer(evidence: Evidence) -> Answer:
        host = host_figures()
        values = zip(claims()[claim].values, host["us_a_token"][model], strict=True)
        how = f"ours: this project's Python on {host['machine']} (benchmarks/deciding.py)"
        return {part: PartFigures(value) for part, value in values}, how

    return answer
