"""The parts of a diagnosis add up, by hand and against independent sums."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from crisp.diagnose.contracts import BEST, CONTRACTS, EnginePolicy, contract_of
from crisp.diagnose.diagnosis import (
    FIRST_USES,
    POLICY,
    WORKING_SET,
    LogDiagnosis,
)
from crisp.diagnose.investigation import diagnose, steps
from crisp.diagnose.logged_run import LoggedRun
from crisp.diagnose.others import cache_policies, run_policy, stand_in_spec, width_policies
from crisp.diagnose.page import render_page
from crisp.diagnose.reads import Reads, cost_of, load_time_of
from crisp.diagnose.replay import replay
from crisp.errors import CrispError
from crisp.hardware.profile import HardwareProfile
from crisp.policy import Budget, named
from tests.crisp.diagnose.route_log import random_routing
from tests.crisp.diagnose.test_replay import SIZES, E, trace_of

DISK = """
kind = "disk"
model = "analytic"
no_power = "none"
[link]
bandwidth_gb_s = { value = 1, source = "test" }
latency_us = { value = 1, source = "test" }
[compute]
rate_tflops = { value = 1, source = "test" }
launch_us = { value = 1, source = "test" }
[memory]
bandwidth_gb_s = { value = 1, source = "test" }
"""


@pytest.fixture
def run() -> LoggedRun:
    trace = trace_of(random_routing(3, 6, 3, E, 3, pruned=True), random_routing(4, 40, 3, E, 3))
    return LoggedRun("toy", trace, SIZES)


@pytest.fixture
def disk(tmp_path: Path) -> HardwareProfile:
    path = tmp_path / "disk.toml"
    path.write_text(DISK)
    return HardwareProfile.load(path)


def found_of(run: LoggedRun, budget: str = "40%", **more: object) -> LogDiagnosis:
    return diagnose(run, CONTRACTS["bigmoeonedge"], Budget.parse(budget), **more)  # type: ignore[arg-type]


def test_causes_add_up(run: LoggedRun) -> None:
    found = found_of(run)
    assert sum(found.parts.values()) == pytest.approx(found.own.bytes_per_token)
    calls = run.calls()
    policy = CONTRACTS["bigmoeonedge"].policy
    budget = int(0.4 * 330 * E)
    aligned = 3 * 4096
    for cost, rule in ((found.own, policy), (found.best, BEST)):
        read = replay(calls, rule, budget).read_bytes(aligned)
        assert cost.bytes_per_token == read[calls.token >= 0].sum() / 40
    prompt = {e for n, call in enumerate(calls.entries) if calls.token[n] < 0 for e in call}
    decoded = {e for n, call in enumerate(calls.entries) if calls.token[n] >= 0 for e in call}
    first = sum(SIZES[entry // E] + aligned for entry in decoded - prompt) / 40
    assert found.parts[FIRST_USES] == pytest.approx(first)
    assert found.uncached.hit_rate == 0 and found.uncached.loads_per_token == 9


def test_verdicts(run: LoggedRun) -> None:
    assert found_of(run, "5%").verdict == WORKING_SET
    assert found_of(run, "100%").verdict == FIRST_USES
    assert found_of(run, "100%").parts == {
        POLICY: 0, WORKING_SET: 0, FIRST_USES: found_of(run, "100%").own.bytes_per_token,
    }  # fmt: skip
    few = trace_of([], [[[n % E]] for n in range(60)], (10,))  # round and round
    cycle = LoggedRun("cycle", few, (10,))
    assert found_of(cycle, "9%").verdict == WORKING_SET
    assert found_of(cycle, "9%").answer == "Mostly the working set"
    # with room for ten of twelve an LRU lets go what comes next, and the best cache does not
    almost = found_of(cycle, "90%")
    assert almost.verdict == POLICY and almost.own.hit_rate == 0
    assert almost.best.loads_per_token == pytest.approx(20 / 60)  # 12 first, 8 again


def test_what_helps_most_is_one_of_a_kind(run: LoggedRun) -> None:
    found = found_of(run)
    helpful = found.most_helpful()
    assert len({setting.kind for setting in helpful}) == len(helpful)
    for setting in helpful:
        assert setting.cost.bytes_per_token < found.own.bytes_per_token
        same = [s for s in found.settings if s.kind == setting.kind]
        if setting.kind != "memory":
            assert setting.cost.bytes_per_token == min(s.cost.bytes_per_token for s in same)
        else:
            assert setting.name.startswith("2 x")
    ranks = [(setting.loses_quality, setting.cost.bytes_per_token) for setting in helpful]
    assert ranks == sorted(ranks)


def test_our_lru_is_the_straight_one(run: LoggedRun) -> None:
    """Slots of each layer, all of an event equally recent, nothing of it evicted."""
    spec = stand_in_spec(run.trace, SIZES)
    budget = 100 * 10 + 130 * 10 + 100 * 10  # ten of twelve experts in each layer
    reads = run_policy(run.trace, spec, SIZES, named("lru"), budget)
    held: list[dict[int, int]] = [{}, {}, {}]
    n_bytes = hits = 0
    for clock in range(run.trace.rows + 1):
        rows = slice(0, 6) if clock == 0 else slice(clock + 5, clock + 6)
        if rows.start >= run.trace.rows:
            break
        for layer in range(3):
            ids = [e for e in run.trace.experts[rows, layer].ravel().tolist() if e >= 0]
            once = list(dict.fromkeys(ids))
            for expert in once:
                if expert in held[layer]:
                    hits += 1
                    held[layer][expert] = clock
            for expert in once:
                if expert in held[layer]:
                    continue
                n_bytes += SIZES[layer] if clock else 0
                if len(held[layer]) == 10:
                    may_go = [e for e in held[layer] if e not in once]
                    if not may_go:
                        continue
                    del held[layer][min(may_go, key=lambda e: (held[layer][e], e))]
                held[layer][expert] = clock
    assert reads.n_bytes[reads.token >= 0].sum() == n_bytes
    assert reads.hits.sum() == hits
    paged = run_policy(run.trace, spec, SIZES, named("lru"), budget, aligned=7)
    assert (paged.n_bytes == reads.n_bytes + 7 * reads.requests).all()
    assert reads.token.max() == 39 and len(reads.token) == 3 + 3 * 40


def test_profiles_come_from_the_first_prompt(run: LoggedRun) -> None:
    """A static cache of one expert a layer holds what the prompt's six tokens ask for most."""
    spec = stand_in_spec(run.trace, SIZES)
    reads = run_policy(run.trace, spec, SIZES, named("lru", cache="static"), sum(SIZES))
    hits = 0
    for layer in range(3):
        prompt = run.trace.experts[:6, layer].ravel()
        most = np.bincount(prompt[prompt >= 0], minlength=E).argmax()
        hits += int((run.trace.experts[6:, layer] == most).any(axis=1).sum())
    assert reads.hits[reads.token >= 0].sum() == hits
    with pytest.raises(CrispError, match="a log of one token: there is nothing to compare"):
        found_of(LoggedRun("one", run.trace.select(slice(6, 7)), SIZES))


def test_widths_load_less_and_say_so(run: LoggedRun) -> None:
    found = found_of(run)
    by_name = {setting.name: setting for setting in found.settings if setting.kind == "width"}
    assert all(setting.loses_quality for setting in by_name.values())
    half, most = by_name["uniform(share=0.5)"], by_name["uniform(share=0.75)"]
    assert half.cost.bytes_per_token < most.cost.bytes_per_token
    assert not any("skip" in policy.width_name for policy in width_policies(run.trace))
    assert {policy.cache.name for policy in cache_policies()} >= {"lru", "lfu", "slru", "static"}


def test_the_time_of_loads(run: LoggedRun, disk: HardwareProfile) -> None:
    found = found_of(run, hardware=disk)
    # 1 us and 1 ns a byte for each of the nine experts that a token looks up, if nothing is kept
    per_token = 9 * 1000 + 3 * sum(SIZES) + 9 * 3 * 4096
    assert found.uncached.load_ms_per_token == pytest.approx(per_token / 1e6)
    assert found.machine == "disk"
    assert load_time_of(disk, stand_in_spec(run.trace, SIZES))(1000) == 2000


def test_the_stand_in_has_eight_blocks_of_the_mean_size(run: LoggedRun) -> None:
    spec = stand_in_spec(run.trace, (3_059_712, 2_654_208, 3_059_712))
    mean = (3_059_712 * 2 + 2_654_208) // 3
    assert spec.n_blocks == 8
    assert Fraction(mean, 8) <= spec.block_bytes < mean / 8 + 4096
    assert stand_in_spec(run.trace, (1, 1, 1)).block_bytes == 4096


def test_a_log_without_decoded_tokens(run: LoggedRun) -> None:
    prompt = run.trace.select(slice(0, 6))
    found = found_of(LoggedRun("prompt", prompt, SIZES))
    assert (found.prompt_tokens, found.tokens, found.windows) == (6, 0, ())
    assert found.own.bytes_per_token > 0


def test_budgets_and_engines() -> None:
    run = LoggedRun("toy", trace_of([], [[[0], [1], [2]]] * 3), SIZES)
    with pytest.raises(CrispError, match=r"budget '1GB': more than all experts \(3.96 kB\)"):
        found_of(run, "1GB")
    with pytest.raises(CrispError, match="unknown engine 'colibry'; did you mean 'colibri'"):
        contract_of("colibry")
    with pytest.raises(CrispError, match="unknown rule 'mru'"):
        EnginePolicy("mru")


def test_projections(run: LoggedRun) -> None:
    assert run.projections == 3
    trace = run.trace
    object.__setattr__(trace.header, "model", "google_gemma-4-26B-A4B-it-Q4_K_M.gguf")
    assert run.projections == 2


def test_cost_of_nothing_decoded() -> None:
    reads = Reads(*(np.array([4, 4]), np.array([1, 3]), np.array([30, 10]), np.array([3, 1])),
                  np.array([-1, -1], np.int32))  # fmt: skip
    cost = cost_of(reads, None)
    assert (cost.hit_rate, cost.decode_hit_rate, cost.load_ms_per_token) == (0.5, 0.5, None)


@pytest.mark.seconds
def test_the_page_is_safe_and_the_same_each_time(run: LoggedRun) -> None:
    ticks: list[int] = []
    evil = LoggedRun("<script>alert(1)</script>", run.trace, SIZES)
    found = found_of(evil, curves=True, progress=lambda: ticks.append(1))
    assert abs(len(ticks) - steps(evil, CONTRACTS["bigmoeonedge"], True)) <= 3
    page = render_page(found, ["<b>&"])
    assert page == render_page(found, ["<b>&"])
    assert "<script" not in page and "&lt;b&gt;&amp;" in page
    assert page.count("<svg") == 3 and "default-src 'none'" in page
    assert set(re.findall(r"https?://[^/\"]+", page)) == {"http://www.w3.org"}  # names of SVG
