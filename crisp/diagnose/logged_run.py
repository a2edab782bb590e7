"""What is diagnosed: the routing in a log, and how large the experts are."""

from __future__ import annotations

from dataclasses import dataclass

from crisp.diagnose.calls import Calls
from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget
from crisp.trace import RoutingTrace
from crisp.units import format_bytes

_FUSED = ("gemma-4", "gemma4")  # gate and up are one matrix: two projections, not three


@dataclass(frozen=True, eq=False)
class LoggedRun:
    """The routing of a log and the sizes of its experts: what is diagnosed."""

    name: str
    trace: RoutingTrace
    expert_bytes: tuple[int, ...]  # [layers]
    spec: ModelSpec | None = None  # the model's own geometry, where it is known
    notes: tuple[str, ...] = ()

    @property
    def projections(self) -> int:
        """The matrices of one expert, each of which a miss reads for itself."""
        if self.spec is not None:
            return self.spec.matrices
        model = (self.trace.header.model or "").lower()
        return 2 if any(name in model for name in _FUSED) else 3

    @property
    def total_bytes(self) -> int:
        """The bytes of all experts of all layers."""
        moe = self.trace.moe_layers
        return sum(self.expert_bytes[layer] for layer in moe) * self.trace.header.n_experts

    def calls(self, lookups: str = "expert") -> Calls:
        """Return the layer calls, by what they look up (see `Calls.from_trace`)."""
        return Calls.from_trace(
            self.trace, self.expert_bytes, lookups=lookups, projections=self.projections
        )

    def budget_bytes(self, budget: Budget) -> int:
        """Return a budget in bytes; CrispError for one above all experts."""
        n_bytes = budget.n_bytes
        if budget.share is not None:
            n_bytes = int(budget.share * self.total_bytes)
        assert n_bytes is not None
        if n_bytes > self.total_bytes:
            raise CrispError(
                f"budget '{budget.text}': more than all experts ({format_bytes(self.total_bytes)})"
            )
        return n_bytes
