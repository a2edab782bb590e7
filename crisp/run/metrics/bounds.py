"""Lower bounds of a run's time and bytes, see `crisp.run.account.TimeBounds`."""

from __future__ import annotations

from crisp.hardware.cost import costs_by_row
from crisp.hardware.profile import CostModel
from crisp.model.spec import ModelSpec
from crisp.run.counters import FewestLoads
from crisp.run.timeline import RunTotals


def time_bounds(
    spec: ModelSpec,
    cost: CostModel | None,
    sums: RunTotals,
    n_bytes: int,
    belady: FewestLoads | None,
    steps: int,
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Return (lower bounds of time in ms and of bytes, the reasons of those that are None)."""
    names = ("io", "belady", "order", "compute", "memory")
    bounds: dict[str, float | None] = dict.fromkeys(
        ("belady_bytes_per_token", *(f"{name}_bound_ms_per_token" for name in names))
    )
    if cost is None or belady is None:
        reason = "the times of single activities, undisturbed, were not measured"
        why = dict.fromkeys(bounds, reason)
        why["belady_bytes_per_token"] = "it is counted of simulated runs"
        return bounds, why
    fewest = belady.n_bytes
    bounds |= {
        "belady_bytes_per_token": fewest,
        "io_bound_ms_per_token": cost.io_bound(n_bytes) / 1e6,
        "belady_bound_ms_per_token": cost.io_bound(fewest) / 1e6,
        "order_bound_ms_per_token": sums.order_bound / 1e6,
        "compute_bound_ms_per_token": sums.alone / 1e6,
    }
    if cost.memory_bandwidth is None:
        return bounds, {"memory_bound_ms_per_token": "link and compute share no memory"}
    computed = sums.computed_by_layer()
    by_row = zip(spec.moe_layers, costs_by_row(cost, spec), strict=True)
    traffic = cost.load_traffic(n_bytes)
    traffic += sum(own.compute_traffic(0, computed.get(layer, 0)) for layer, own in by_row)
    traffic += sum(cost.layer_traffic(layer) for layer in range(spec.n_layers)) * steps
    return bounds | {"memory_bound_ms_per_token": traffic / cost.memory_bandwidth * 1e3}, {}
