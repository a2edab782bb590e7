"""Claims about machines that are not there: what a profile models, or this one measures, beside."""

from __future__ import annotations

from collections.abc import Callable

from crisp.model.spec import ModelSpec
from crisp.reproduce.arithmetic import TOP_K, Costs
from crisp.reproduce.claims import claims
from crisp.reproduce.evidence import BUDGETS, GPU, ORIN, POLICIES, Evidence, speeds
from crisp.reproduce.findings.on_paper import Answer, one
from crisp.reproduce.measured import host
from crisp.reproduce.verdict import Found

_PAIR_BYTES = 3  # of an ordered pair: one for its tier, two for its dominant expert
_MODELS = {"Mixtral": "mixtral-8x7b", "DeepSeek-MoE": "deepseek-moe-16b"}
_MINUTES = {"Mixtral": (18, 7, 15, 8), "DeepSeek-MoE": (12, 4, 22, 10)}  # Table 2's rows


def layer_part(claim: str, pick: Callable[[Costs], float]) -> Callable[[Evidence], Answer]:
    """A row of Table 1."""

    def answer(evidence: Evidence) -> Answer:
        how = f"ours: modelled, the profile {GPU}, experts in 4.25 bits"
        return one(claim, how, ours=pick(evidence.gpu))

    return answer


LAYER_PARTS: dict[str, Callable[[Costs], float]] = {
    "T1.load": lambda costs: TOP_K * costs.load,
    "T1.compute": lambda costs: TOP_K * costs.compute,
}


def energy(claim: str, machine: str) -> Callable[[Evidence], Answer]:
    """Figure 11: joules."""

    def answer(evidence: Evidence) -> Answer:
        crisp, full = (
            evidence.joules(speeds(machine, POLICIES[name], BUDGETS[0])) for name in ("CRISP", "FO")
        )
        how = (
            f"ours: modelled, the profile {machine}; its watts while loading come from Figure 11 "
            "itself"
        )
        return {"CRISP": Found(crisp), "less than FO": Found(100 * (1 - crisp / full))}, how

    return answer


def orin(evidence: Evidence) -> Answer:
    """Figure 11: the Jetson's speed."""
    how = f"ours: modelled, the profile {ORIN}: data sheets, an upper end"
    return one("F11.orin", how, ours=evidence.speed(speeds(ORIN, POLICIES["CRISP"], BUDGETS[0])))


def preparation(evidence: Evidence) -> Answer:
    """Table 2: it adds up; its times need the machine."""
    parts = {part: Found(elsewhere=float(sum(rows))) for part, rows in _MINUTES.items()}
    return parts, "the sums of its rows"


def metadata(evidence: Evidence) -> Answer:
    """Appendix A.4.1: what the look-up tables take."""
    parts = {}
    for part, name in _MODELS.items():
        spec = ModelSpec.named(name)
        parts[part] = Found(_PAIR_BYTES * len(spec.moe_layers) * spec.n_experts**2 / 1e6)
    return parts, "ours: of every ordered pair a byte for its tier, two for its dominant expert"


def deciding(claim: str, model: str) -> Callable[[Evidence], Answer]:
    """Table 3: what the host spends."""

    def answer(evidence: Evidence) -> Answer:
        known = host()
        values = zip(claims()[claim].values, known["us_a_token"][model], strict=True)
        how = f"ours: this project's Python on {known['machine']} (benchmarks/deciding.py)"
        return {part: Found(value) for part, value in values}, how

    return answer
