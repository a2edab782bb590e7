"""simulate(): what a run file holds, and that the same input gives the same bytes."""

from __future__ import annotations

import dataclasses
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.run import result as runs
from crisp.run.case import Case, Conditions
from crisp.run.result import Run
from crisp.scheduler.scheduler import EventScheduler
from crisp.scheduler.workload import Workload, chosen_rows, plan, split
from crisp.sim.hardware import hardware_profile
from crisp.sim.simulate import simulate
from crisp.trace import RoutingTrace
from crisp.trace.bundled import bundled_traces
from crisp.trace.fitting import fit_to_trace


@pytest.fixture(scope="module")
def code() -> RoutingTrace:
    return RoutingTrace.load(bundled_traces()["tiny-mixtral-code"])


def run(
    trace: RoutingTrace,
    policy: str = "crisp",
    machine: str = "rtx4090-pcie4",
    budget: str = "20%",
    **conditions: Any,
) -> Run:
    first, rest, how = split(trace)
    spec = fit_to_trace(ModelSpec.named("mixtral-8x7b").with_(bits=Fraction("4.25")), trace)
    case = Case(
        rest, spec, named(policy), Budget.parse(budget), Profile.from_trace(first),
        Conditions(**({"limit": 60} | conditions)), how,
    )  # fmt: skip
    return simulate(case, hardware_profile(machine))


def test_same_input_same_bytes(code: RoutingTrace, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        runs.save_runs([run(code), run(code, "mo", "jetson-agx-orin-32gb")], tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    loaded = runs.load_runs(tmp_path / "a.json")
    assert [r.to_dict() for r in loaded] == json.loads((tmp_path / "a.json").read_text())


def test_other_inputs_other_hash(code: RoutingTrace) -> None:
    other = RoutingTrace.load(bundled_traces()["tiny-mixtral-docs"])
    made = [run(code), run(other), run(code, seed=1), run(code, budget="30%"), run(code, "lru")]
    hashes = {r.provenance["inputs_sha256"] for r in made}
    assert len(hashes) == len(made)


def test_metrics_hang_together(code: RoutingTrace) -> None:
    metrics = run(code, "crisp", "paper-table1").metrics
    m = {name: value for name, value in metrics.items() if value is not None}
    assert m["tokens"] == 60
    assert m["tokens_per_second"] == pytest.approx(60 / (m["total_ns"] / 1e9))
    assert m["ms_per_token_mean"] == pytest.approx(m["total_ns"] / 1e6 / 60)
    assert m["tasks"] + m["skipped"] == 60 * 6 * 2
    assert m["layer_ms_per_token"] == pytest.approx(6 * 0.6)
    parts = m["stall_ms_per_token"] + m["compute_ms_per_token"] + m["layer_ms_per_token"]
    assert parts == pytest.approx(m["ms_per_token_mean"])
    assert m["bubble"] == pytest.approx(m["stall_ms_per_token"] / m["ms_per_token_mean"])
    # Table 1: a block of an eighth of an expert takes 0.7 ms on the link
    assert m["io_bound_ms_per_token"] == pytest.approx(m["blocks_loaded"] * 0.7 / 60)
    assert m["link_busy"] * m["total_ns"] == pytest.approx(m["blocks_loaded"] * 700_000)
    assert m["io_bound_ms_per_token"] <= m["order_bound_ms_per_token"] <= m["ms_per_token_mean"]


def test_what_cannot_be_had_is_null_with_a_reason(code: RoutingTrace) -> None:
    made = run(code, "lru", "paper-table1")
    nulls = {name for name, value in made.metrics.items() if value is None}
    assert nulls == set(made.unavailable)
    assert nulls == {
        "energy_j_per_token", "energy_net_j_per_token", "ttft_ms",
        "energy_j", "energy_net_j", "decode_energy_j_per_token", "decode_energy_net_j_per_token",
        *(name for name in made.metrics if name.startswith("prefill_") and "_per_" in name),
        "memory_bound_ms_per_token",
        "prefetch_useful_bytes", "prefetch_late_bytes", "prefetch_wasted_bytes",
        "lookup_us_per_event", "queue_us_per_event", "coordination_us_per_event",
        "lookup_us_per_token", "queue_us_per_token", "coordination_us_per_token",
    }  # fmt: skip
    assert run(code, phase="prefill").unavailable["tokens_per_second"] == "no decode rows were run"


def test_energy_is_power_times_time(code: RoutingTrace) -> None:
    """Full offloading lets nothing overlap: the link's share at link power, the rest computing."""
    made = run(code, "fo")
    m, power = made.metrics, hardware_profile("rtx4090-pcie4").power
    assert power is not None
    seconds = (m["total_ns"] or 0) / 1e9 / 60
    busy_link, busy_compute = m["link_busy"] or 0, m["compute_busy"] or 0
    assert busy_link + busy_compute == pytest.approx(1)
    joules = seconds * (busy_link * power.link + busy_compute * power.compute)
    assert m["energy_j_per_token"] == pytest.approx(joules)
    assert m["energy_net_j_per_token"] == pytest.approx(joules - seconds * power.idle)
    assert made.provenance["energy"]["method"].startswith("modelled")
    assert run(code, "fo", "paper-table1").provenance["energy"] is None


def test_prefill_gives_a_time_to_the_first_token(code: RoutingTrace) -> None:
    """Prompts of 96 rows in chunks of 40: three steps each."""
    m = run(code, phase="prefill", limit=192, chunk=40).metrics
    assert m["ttft_ms"] == pytest.approx((m["total_ns"] or 0) / 1e6 / 2)
    assert m["prefill_tokens_per_second"] == pytest.approx(192 / ((m["total_ns"] or 0) / 1e9))
    cut = run(code, phase="prefill", limit=193, chunk=40)  # one row of a third prompt
    assert cut.metrics["ttft_ms"] == m["ttft_ms"]
    assert run(code, phase="prefill", limit=95).unavailable["ttft_ms"] == (
        "no prompt was run to its end"
    )
    whole = run(code, phase="all", limit=None).metrics
    assert whole["tokens"] == split(code)[1].rows


def test_more_slots_serve_more_tokens_a_second(code: RoutingTrace) -> None:
    one, four = run(code, limit=400).metrics, run(code, limit=400, batch=4).metrics
    assert (four["tokens_per_second"] or 0) > (one["tokens_per_second"] or 0)
    assert (four["bytes_loaded"] or 0) < (one["bytes_loaded"] or 0)


def test_useful_late_and_wasted_are_what_was_prefetched(code: RoutingTrace) -> None:
    """Of Table 1's blocks (0.7 ms) two fit beside the last computation and router (1.9 ms)."""
    guided, plain = (run(code, name, "paper-table1").metrics for name in ("mo", "lru"))
    useful, late, wasted = (
        guided[f"prefetch_{how}_bytes"] or 0 for how in ("useful", "late", "wasted")
    )
    assert useful > wasted > 0
    assert late > 0
    assert useful + late + wasted < (guided["bytes_loaded"] or 0)
    assert (guided["tokens_per_second"] or 0) > (plain["tokens_per_second"] or 0)


def test_mapped_weights_have_nothing_to_load(code: RoutingTrace) -> None:
    first, rest, _ = split(code)
    spec = fit_to_trace(ModelSpec.named("mixtral-8x7b"), code)
    jetson = dataclasses.replace(hardware_profile("jetson-agx-orin-32gb"), loads_from="mapped")
    case = Case(
        rest, spec, named("lru"), Budget.parse("10%"), Profile.from_trace(first),
        Conditions(limit=30),
    )  # fmt: skip
    made = simulate(case, jetson)
    assert made.metrics["bytes_loaded"] == 0
    assert made.metrics["hit_rate"] == 1
    assert made.settings["budget"]["share"] == 1


def test_unified_memory_is_slower_than_two_memories_and_faster_than_none(
    code: RoutingTrace,
) -> None:
    """Sharing can only delay; doing one thing after the other is the worst that can happen."""
    shared = run(code, "lru", "jetson-agx-orin-32gb").metrics
    in_turn = run(code, "fo", "jetson-agx-orin-32gb").metrics
    assert (shared["order_bound_ms_per_token"] or 0) <= (shared["ms_per_token_mean"] or 0)
    assert (shared["ms_per_token_mean"] or 0) < (in_turn["ms_per_token_mean"] or 0)
    # 2 * 102.4 GB/s of copying fill the memory: no less than copying plus reading what is computed
    assert (shared["memory_bound_ms_per_token"] or 0) <= (shared["ms_per_token_mean"] or 0)
    copying = 2 * (shared["bytes_per_token"] or 0) / 204.8e9 * 1e3
    assert (shared["memory_bound_ms_per_token"] or 0) > copying


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"granularity": "blok"}, "did you mean 'block'"),
        ({"phase": "decod"}, "did you mean 'decode'"),
        ({"batch": 0}, "batch 0: must be at least 1"),
        ({"limit": 0}, "limit 0: must be at least 1"),
        ({"seed": -1}, "must not be negative"),
    ],
)
def test_conditions_that_are_refused(conditions: dict[str, Any], message: str) -> None:
    with pytest.raises(CrispError, match=message):
        Conditions(**conditions)


def test_a_run_file_of_something_else_is_refused(tmp_path: Path) -> None:
    for content in ("{}", "[1]", "nonsense", '{"version": 99}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(CrispError, match=r"x\.json: "):
            runs.load_runs(tmp_path / "x.json")
    with pytest.raises(CrispError, match="cannot be read"):
        runs.load_runs(tmp_path / "missing.json")


def test_a_policy_that_looks_at_residency_is_asked_event_by_event(code: RoutingTrace) -> None:
    """Whatever is resident runs in full, the rest at half."""

    class Bound:
        residency = True

        def widths(self, layer: int, experts: Any, weights: Any, resident: Any) -> Any:
            return np.where(np.array(resident)[experts] > 4, 8, 4).astype(np.int16)

        def table(self) -> None:
            return None

    workload = Workload(code, Bound(), guess=False)
    event = next(workload.events(plan(code, chosen_rows(code, "decode", 5), 1, 512)))
    assert event.experts is not None
    resident = [0] * 8
    resident[event.experts[0][0]] = 8
    assert [task.width for task in workload.tasks(event, lambda layer: resident)] == [8, 4]


@pytest.mark.parametrize("method", ["loaded", "next_load", "computed"])
def test_a_failure_in_a_stream_ends_the_run(
    code: RoutingTrace, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Ctrl-C, or a fault of ours, wherever it strikes: never a run that goes on for ever."""
    calls = 0
    original = getattr(EventScheduler, method)

    def failing(self: EventScheduler, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 50:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(EventScheduler, method, failing)
    with pytest.raises(KeyboardInterrupt):
        run(code)


def test_more_slots_than_sequences_are_not_made(code: RoutingTrace) -> None:
    assert run(code, batch=10**12).metrics == run(code, batch=12).metrics


def test_the_documentation_names_every_metric(code: RoutingTrace) -> None:
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text(encoding="utf-8")
    table = "".join(line for line in page.splitlines() if line.startswith("| `"))
    named_there = set(re.findall(r"`([a-z_0-9]+)`", "".join(re.findall(r"\| (`.*?) \|", table))))
    assert set(run(code).metrics) == named_there
