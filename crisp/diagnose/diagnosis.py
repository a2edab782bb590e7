"""The figures of a diagnosis, and what they say: is it the policy or the working set?

Of the bytes that a decoded token loads by the engine's rule, a part are first uses, which no cache
holds; another part the best cache of the same size loads as well, which is the working set that
does not fit; the rest is the policy's.
"""

from __future__ import annotations

from dataclasses import dataclass

from crisp.diagnose.contracts import Contract
from crisp.diagnose.reads import Cost

FIRST_USES, WORKING_SET, POLICY = "first uses", "the working set", "the policy"
TWICE = "2 x the budget"  # the name of a setting


@dataclass(frozen=True)
class Setting:
    """Something that could be set otherwise, and what a decoded token would then cost."""

    kind: str  # cache, memory or width
    name: str
    cost: Cost
    loses_quality: bool = False


@dataclass(frozen=True)
class LogDiagnosis:
    """All figures of a diagnosis. Bytes are of a decoded token, unless said otherwise."""

    log: str
    model: str | None
    contract: Contract
    budget: str
    budget_bytes: int
    total_bytes: int
    prompt_tokens: int
    tokens: int  # decoded
    layers: int  # MoE
    experts: int
    top_k: int
    expert_bytes: tuple[int, int]  # least and most of a layer
    machine: str | None
    own: Cost  # by the engine's rule
    best: Cost  # by the best cache of the same size
    uncached: Cost
    first_use_bytes: float
    settings: tuple[Setting, ...]
    windows: tuple[tuple[int, float], ...]  # tokens in a row, bytes of their distinct experts
    curves: dict[str, list[tuple[int, float]]]  # rule -> (budget, bytes of a token)
    notes: tuple[str, ...]

    @property
    def parts(self) -> dict[str, float]:
        """The bytes of a decoded token by their cause; they add up to what the engine loads."""
        first = min(self.first_use_bytes, self.own.bytes_per_token)
        best = min(max(self.best.bytes_per_token, first), self.own.bytes_per_token)
        return {
            POLICY: self.own.bytes_per_token - best,
            WORKING_SET: best - first,
            FIRST_USES: first,
        }

    @property
    def verdict(self) -> str:
        """The largest of the three parts."""
        return max(self.parts, key=self.parts.__getitem__)

    @property
    def answer(self) -> str:
        """The verdict in words that say whether it is more than half."""
        half = 2 * self.parts[self.verdict] >= self.own.bytes_per_token
        return (
            f"Mostly {self.verdict}"
            if half
            else f"{self.verdict.capitalize()}, more than anything else"
        )

    @property
    def saved_without_foresight(self) -> float:
        """The share of the policy's part that the best rule saves which knows no future."""
        if self.parts[POLICY] <= 0:
            return 0.0
        caches = (s.cost.bytes_per_token for s in self.settings if s.kind == "cache")
        saved = self.own.bytes_per_token - min(caches, default=self.own.bytes_per_token)
        return min(1.0, max(0.0, saved / self.parts[POLICY]))

    def most_helpful(self) -> list[Setting]:
        """Return the best setting of each kind, where it loads less, by falling gain.

        What loses quality comes last. Of memory that is twice the budget, as more helps more.
        """
        best: dict[str, Setting] = {}
        for setting in sorted(self.settings, key=lambda s: s.cost.bytes_per_token):
            less = setting.cost.bytes_per_token < self.own.bytes_per_token
            if less and (setting.kind != "memory" or setting.name == TWICE):
                best.setdefault(setting.kind, setting)
        return sorted(best.values(), key=lambda s: (s.loses_quality, s.cost.bytes_per_token))
