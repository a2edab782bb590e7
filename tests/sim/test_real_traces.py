"""Runs of real routing: known figures, and every kind of cell against the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Cache, named, static_residents
from crisp.profile import Profile
from crisp.run.case import Case, Conditions
from crisp.run.result import Run
from crisp.scheduler.workload import split
from crisp.sim.fast_simulate import fast_simulate
from crisp.sim.hardware import hardware_profile
from crisp.sim.simulate import simulate
from crisp.trace import Header, RoutingTrace
from crisp.trace.chains import read_chains
from crisp.trace.fitting import fit_to_trace
from crisp.trace.importing.table import import_table
from crisp.trace.synth import synthesize
from tests.oracles import offline, straight

MS = 1_000_000


@dataclass(frozen=True)
class Divided:
    """A trace split for simulation, and its model's geometry."""

    rest: RoutingTrace
    profile: Profile
    spec: ModelSpec
    profile_rows: Any  # [rows, layers, k]

    @classmethod
    def of(cls, trace: RoutingTrace, model: str) -> Divided:
        first, rest, _ = split(trace)
        spec = fit_to_trace(ModelSpec.named(model), trace)
        return cls(rest, Profile.from_trace(first), spec, first.experts)

    def run(
        self, policy: str, budget: str, limit: int, engine: Any = simulate, **changes: Any
    ) -> Run:
        conditions = {k: changes.pop(k) for k in ("granularity", "batch") if k in changes}
        case = Case(
            self.rest, self.spec, named(policy, has_guess=False, **changes), Budget.parse(budget),
            self.profile, Conditions(limit=limit, **conditions),
        )  # fmt: skip
        run: Run = engine(case, hardware_profile("paper-table1"))
        return run


@pytest.fixture(scope="session")
def gpt_oss(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Divided:
    out = tmp_path_factory.mktemp("traces") / "gpt-oss.trace.safetensors"
    spec = ModelSpec.named("gpt-oss-20b")
    import_table(shared / "traces" / "gpt-oss-20b__mmlu-gpqa-mix.parquet", out, spec=spec)
    return Divided.of(RoutingTrace.load(out), "gpt-oss-20b")


@pytest.fixture(scope="session")
def mixtral(shared: Path) -> Divided:
    names = ("mixtral-8x7b-pair-counts.csv", "mixtral-8x7b-persistence.csv")
    chains = read_chains(*(shared / "traces" / name for name in names))
    return Divided.of(synthesize(chains, 600, seed=0, sequences=4), "mixtral-8x7b")


@pytest.mark.parametrize(
    ("policy", "budget", "total_ns", "hits", "partial", "blocks"),
    [
        ("fo", "10%", 2030400000000, 0, 0, 2304000),
        ("lru", "10%", 1143739700000, 108314, 0, 1437488),
        ("lru", "50%", 498852900000, 257472, 0, 244224),
        ("up", "20%", 302701600000, 238427, 0, 198292),
        ("crisp", "10%", 909256600000, 102373, 4800, 1124984),
        ("crisp", "30%", 521945600000, 201206, 5632, 425092),
    ],
)
def test_known_figures(
    gpt_oss: Divided, policy: str, budget: str, total_ns: int, hits: int, partial: int, blocks: int
) -> None:
    """3,000 tokens of gpt-oss-20b; figures of three separate re-computations."""
    engine = simulate if (policy, budget) in (("lru", "10%"), ("crisp", "30%")) else fast_simulate
    metrics = gpt_oss.run(policy, budget, 3000, engine=engine).metrics
    names = ("total_ns", "hits", "partial_hits", "blocks_loaded")
    assert tuple(metrics[name] for name in names) == (total_ns, hits, partial, blocks)
    skipped = 21110 if policy == "crisp" else 0
    assert (metrics["tasks"], metrics["skipped"]) == (288000 - skipped, skipped)


CELLS: list[tuple[str, str, dict[str, Any]]] = [
    ("lru", "30%", {}),
    ("up", "10%", {}),
    ("crisp", "50%", {}),
    ("lru", "30%", {"cache": "lfu"}),
    ("crisp", "50%", {"cache": "lfu", "scope": "global", "unit": "block"}),
    ("crisp", "30%", {"cache": "static"}),
    ("lru", "20%", {"cache": "static", "scope": "global", "unit": "block"}),
    ("crisp", "10%", {"unit": "block"}),
    ("crisp", "20%", {"granularity": "block"}),
    ("crisp", "30%", {"unit": "block", "granularity": "block", "order": "johnson"}),
    ("lru", "30%", {"scope": "global"}),
    ("crisp", "50%", {"scope": "global", "unit": "block"}),
    ("mo", "10%", {}),
    ("mo", "30%", {"scope": "global", "granularity": "block"}),
    ("mo", "20%", {"width": "tiered", "order": "widest", "unit": "block"}),
    ("crisp", "20%", {"width": "single"}),
    ("crisp", "20%", {"batch": 3}),
]


@pytest.mark.parametrize(("policy", "budget", "changes"), CELLS)
@pytest.mark.parametrize("source", [pytest.param("gpt_oss", marks=pytest.mark.slow), "mixtral"])
def test_cells_equal_the_oracles(
    request: pytest.FixtureRequest,
    source: str,
    policy: str,
    budget: str,
    changes: dict[str, Any],
) -> None:
    case: Divided = request.getfixturevalue(source)
    rows = 150
    run = case.run(policy, budget, rows, **changes)
    shown = named(policy, has_guess=False, **{
        key: value for key, value in changes.items() if key not in ("granularity", "batch")
    }).to_dict()  # fmt: skip
    experts, n = case.rest.experts[:rows], case.spec.n_experts
    share = Fraction(budget.rstrip("%")) / 100
    cache = Cache(str(shown["cache"]), str(shown["scope"]), str(shown["unit"]))
    static = offline.static_set(
        offline.expert_counts(case.profile_rows, n), case.spec.moe_layers, share, 8,
        cache.scope, cache.unit,
    )  # fmt: skip
    width = str(shown["width"]).split("(")[0]
    widths = {
        "full": lambda: offline.widths_full(experts, 8),
        "uniform": lambda: offline.widths_full(experts, 4),
        "single": lambda: offline.widths_single(experts, 8),
        "tiered": lambda: offline.widths_tiered(
            experts, 8, offline.tiers(offline.pair_counts(case.profile_rows, n)), 4
        ),
    }[width]()
    expected = straight.simulate(
        experts, sequence=case.rest.sequence[:rows], n_experts=n, n_blocks=8, widths=widths,
        order=shown["order"], cache=shown["cache"], share=share, scope=cache.scope,
        unit=cache.unit, granularity=changes.get("granularity", "expert"),
        static=static if shown["cache"] == "static" else None, prefetch=shown["prefetch"],
        batch=changes.get("batch", 1), log=False,
        **offline.table_costs(56 * MS // 10, 13 * MS // 10, 6 * MS // 10, 8),
    )  # fmt: skip
    names = {"total_ns": "total_ns", "tasks": "tasks", "hits": "hits", "partial_hits": "partial",
             "blocks_loaded": "blocks_loaded", "skipped": "skipped_entries"}  # fmt: skip
    found = {name: run.metrics[name] for name in names}
    assert found == {name: expected[theirs] for name, theirs in names.items()}
    assert run.metrics["bytes_loaded"] == expected["blocks_loaded"] * case.spec.block_bytes


def random_trace(rows: int, layers: int, n_experts: int, k: int) -> RoutingTrace:
    """Uniform routing."""
    random = np.random.default_rng(0).random((rows, layers, n_experts))
    return RoutingTrace(
        experts=random.argsort(axis=2)[:, :, :k].astype(np.int16),
        sequence=np.zeros(rows, np.int32),
        position=np.arange(rows, dtype=np.int32),
        phase=np.ones(rows, np.uint8),
        header=Header(n_experts=n_experts, top_k=k, ordered=True, origin="synthetic"),
    )


def test_full_offloading_by_hand() -> None:
    """32 layers of 0.6 + 2 * (5.6 + 1.3) ms = 14.4 ms each: 2.1701 tokens/s, nothing ever hits."""
    case = Divided.of(random_trace(40, 32, 8, 2), "mixtral-8x7b")
    metrics = case.run("fo", "10%", 20).metrics
    assert metrics["total_ns"] == 20 * 32 * 14_400_000
    assert round(metrics["tokens_per_second"] or 0, 4) == 2.1701
    assert metrics["hit_rate"] == 0
    assert metrics["compute_hidden"] == 0
    assert metrics["energy_j_per_token"] is None


def test_static_residents_of_a_real_profile(gpt_oss: Divided) -> None:
    cache = Cache("static", "layer", "expert")
    room = Budget.parse("10%").capacity(gpt_oss.spec, cache)
    assert room == [32] * 4 + [24] * 20  # 76 of 768 experts: 3 a layer, 4 in the first four
    held = static_residents(gpt_oss.spec, gpt_oss.profile, cache, room)
    assert sum(held) == 76 * 8
