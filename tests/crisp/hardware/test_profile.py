"""Hardware profiles: what is refused, and what the cost models answer, worked out by hand."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crisp.errors import CrispError
from crisp.hardware.cost import AnalyticCost
from crisp.hardware.profile import CostModel, HardwareProfile, Power, cost_model
from crisp.model.spec import BUILTIN, ModelSpec

POWER = {"idle_w": 10, "link_w": 20, "compute_w": 30, "both_w": 45}
DISCRETE: dict[str, Any] = {
    "kind": "discrete",
    "model": "analytic",
    "link": {"bandwidth_gb_s": 20, "latency_us": 5},
    "compute": {"rate_tflops": 100, "launch_us": 3},
    "memory": {"bandwidth_gb_s": 1000},
    "power": POWER,
}
UNIFIED = DISCRETE | {"kind": "unified", "loads_from": "memory"}
UNIFIED |= {"memory": {"bandwidth_gb_s": 200}}
TABLE: dict[str, Any] = {
    "kind": "discrete",
    "model": "table",
    "no_power": "not measured",
    "table": {"expert_load_ms": 5.6, "expert_compute_ms": 1.3, "layer_ms": 0.6},
}

# 2 blocks of 64 neurons, the second with 36; a block is 64 * 3 * 512 * 2 bytes = 48 pages
SMALL = ModelSpec.from_config(
    {
        "model_type": "mixtral",
        "hidden_size": 512,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "small",
).with_(block=64)


def toml(content: dict[str, Any]) -> str:
    """The text of a profile; a bare number gets a source."""

    def entry(value: object) -> str:
        if isinstance(value, str):
            return value  # as TOML
        return f"{{ value = {value}, source = 'a test' }}"

    words = [f"{k} = '{v}'" for k, v in content.items() if not isinstance(v, dict)]
    for section, keys in content.items():
        if isinstance(keys, dict):
            words += [f"[{section}]", *(f"{k} = {entry(v)}" for k, v in keys.items())]
    return "\n".join(words)


def load(folder: Path, content: dict[str, Any]) -> HardwareProfile:
    file = folder / "mine.toml"
    file.write_text(toml(content))
    return HardwareProfile.load(file)


def cost(folder: Path, content: dict[str, Any], spec: ModelSpec = SMALL) -> CostModel:
    return cost_model(load(folder, content), spec)


def change(content: dict[str, Any], section: str, **keys: Any) -> dict[str, Any]:
    """A profile with some keys of one section changed; `...` removes a key."""
    changed = content.get(section, {}) | keys
    return content | {section: {k: v for k, v in changed.items() if v is not ...}}


# -- costs ---------------------------------------------------------------------------------------


def test_sizes_of_the_small_model() -> None:
    assert (SMALL.n_blocks, SMALL.block_bytes) == (2, 64 * 3 * 512 * 2)
    assert SMALL.dense_params[0] == 4 * 512**2 + 512 * 4 + 2 * 512


def test_a_load_is_latency_and_bytes_over_bandwidth(tmp_path: Path) -> None:
    costs = cost(tmp_path, DISCRETE)
    assert costs.load(200_000) == 5_000 + 10_000
    assert costs.io_bound(200_000) == 10_000.0
    assert costs.load(0) == 5_000


def test_a_computation_waits_for_memory_or_for_arithmetic(tmp_path: Path) -> None:
    costs = cost(tmp_path, DISCRETE)
    # one row: 393,216 bytes at 1000 bytes/ns; 100 neurons * 2 * 3 * 512 FLOP take 3 ns
    assert costs.compute(0, 2, 100) == 3_000 + 393
    # 500 rows: 153,600,000 FLOP at 100,000 FLOP/ns
    assert costs.compute(0, 2, 500 * 100) == 3_000 + 1_536


def test_every_piece_pays_one_launch(tmp_path: Path) -> None:
    costs = cost(tmp_path, DISCRETE)
    assert costs.compute(0, 1, 64) == 3_000 + 197
    assert costs.compute(1, 2, 36) == 3_000 + 197  # the short block reads its padding, too
    assert costs.compute(0, 2, 64 + 36) == 3_000 + 393


def test_a_layer_is_everything_but_the_routed_experts(tmp_path: Path) -> None:
    costs = cost(tmp_path, DISCRETE)
    # 1,051,648 parameters: 2,103,296 bytes at 1000 bytes/ns against 2 FLOP each
    assert costs.layer(0, 1) == 3_000 + 2_103
    assert costs.layer(0, 1000) == 3_000 + 21_033


def test_a_dense_layer_has_its_own_time(tmp_path: Path) -> None:
    deepseek = BUILTIN["deepseek-moe-16b"]
    costs = cost(tmp_path, DISCRETE, deepseek)
    assert costs.layer(0, 1) == 3_000 + round(deepseek.dense_params[0] * 2 / 1000)
    assert costs.layer(0, 1) > costs.layer(1, 1)
    flops = [2 * n * 1000 for n in deepseek.dense_params[:2]]  # 1000 rows, 10^5 FLOP/ns
    assert [costs.layer(i, 1000) - 3_000 for i in (0, 1)] == [round(n / 1e5) for n in flops]


def test_times_are_rounded_once_and_halves_go_up(tmp_path: Path) -> None:
    costs = cost(tmp_path, change(DISCRETE, "link", bandwidth_gb_s=2, latency_us=0.0005))
    assert costs.load(1) == 1  # 0.5 + 0.5
    slow = change(DISCRETE, "link", bandwidth_gb_s=2, latency_us=0)
    assert [cost(tmp_path, slow).load(n) for n in range(6)] == [0, 1, 1, 2, 2, 3]


@given(st.integers(0, 10**12), st.fractions(Fraction(1, 1000), 1000), st.fractions(0, 10**6))
def test_loads_are_exact(n_bytes: int, link: Fraction, latency: Fraction) -> None:
    one = Fraction(1)
    costs = AnalyticCost(
        SMALL, link=link, latency=latency, rate=one, launch=one, memory=one, shared=False, copies=1
    )
    missed = latency + n_bytes / link - costs.load(n_bytes)
    assert Fraction(-1, 2) <= missed < Fraction(1, 2)


def test_the_table_is_linear_in_bytes_and_blocks(tmp_path: Path) -> None:
    costs = cost(tmp_path, TABLE, BUILTIN["mixtral-8x7b"])
    expert = BUILTIN["mixtral-8x7b"].expert_bytes
    assert (costs.load(expert), costs.compute(0, 8, 14336)) == (5_600_000, 1_300_000)
    assert (costs.load(expert // 2), costs.compute(0, 4, 7168)) == (2_800_000, 650_000)
    assert costs.compute(5, 6, 1792) == costs.compute(0, 1, 1792) == 162_500
    assert costs.layer(31, 1) == costs.layer(31, 512) == 600_000
    assert costs.io_bound(expert) == 5_600_000.0
    assert costs.memory_bandwidth is None


# -- unified memory ------------------------------------------------------------------------------


def test_a_discrete_link_shares_nothing(tmp_path: Path) -> None:
    for content in (DISCRETE, DISCRETE | {"kind": "disk"}, TABLE):
        costs = cost(tmp_path, content)
        assert costs.memory_bandwidth is None
        traffic = costs.load_traffic(9), costs.compute_traffic(0, 2), costs.layer_traffic(0)
        assert traffic == (0, 0, 0)


@pytest.mark.parametrize(("origin", "copies"), [("memory", 2), ("disk", 1)])
def test_a_load_crosses_the_shared_memory(tmp_path: Path, origin: str, copies: int) -> None:
    costs = cost(tmp_path, UNIFIED | {"loads_from": origin})
    assert costs.memory_bandwidth == 200e9
    assert costs.load_traffic(1000) == copies * 1000
    assert costs.load(200_000) == 5_000 + 10_000  # alone, it runs at the link's bandwidth
    assert costs.compute_traffic(0, 2) == 393_216
    assert costs.layer_traffic(0) == 2_103_296


def test_mapped_weights_need_no_load(tmp_path: Path) -> None:
    content = UNIFIED | {"loads_from": "mapped"}
    del content["link"]
    costs = cost(tmp_path, content)
    assert (costs.load(10**9), costs.load_traffic(10**9), costs.io_bound(10**9)) == (0, 0, 0.0)
    assert costs.compute(0, 2, 100) == 3_000 + 1_966  # 393,216 bytes at 200 bytes/ns


# -- the profile ---------------------------------------------------------------------------------


def test_a_profile_keeps_numbers_sources_and_power(tmp_path: Path) -> None:
    profile = load(tmp_path, change(DISCRETE, "link", bandwidth_gb_s=0.1))
    assert profile.name == "mine"
    assert profile.numbers["link.bandwidth_gb_s"] == Fraction(1, 10)  # exact, not a float
    assert set(profile.sources.values()) == {"a test"}
    assert profile.power == Power(10.0, 20.0, 30.0, 45.0)
    assert profile.no_power is None
    assert load(tmp_path, TABLE).power is None
    assert load(tmp_path, TABLE).no_power == "not measured"


def test_a_profile_can_be_written_into_a_run(tmp_path: Path) -> None:
    printed = load(tmp_path, UNIFIED).to_dict()
    assert json.loads(json.dumps(printed)) == printed
    assert (printed["name"], printed["kind"], printed["loads_from"]) == (
        "mine",
        "unified",
        "memory",
    )
    assert printed["numbers"]["link.latency_us"] == {"value": 5, "source": "a test"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (change(DISCRETE, "link", bandwidth_gb_s=...), "link.bandwidth_gb_s: is missing"),
        (change(DISCRETE, "link", bandwidth_gb_s=-1), "found -1, expected more than 0"),
        (change(DISCRETE, "link", bandwidth_gb_s=0), "found 0, expected more than 0"),
        (change(DISCRETE, "link", latency_us=-0.5), "link.latency_us: found -0.5"),
        (change(DISCRETE, "memory", bandwidth_gb_s="nan"), "memory.bandwidth_gb_s: expected {"),
        (change(DISCRETE, "memory", bandwidth_gb_s=float("nan")), "found NaN, expected a finite"),
        (change(DISCRETE, "memory", bandwidth_gb_s=float("inf")), "found Infinity, expected a"),
        (change(DISCRETE, "memory", bandwidth_gb_s="{value=1e999999999, source='x'}"), "finite"),
        (change(DISCRETE, "power", idle_w=...), "power.idle_w: is missing"),
        (change(DISCRETE, "power", idle_w=-1), "power.idle_w: found -1"),
        (change(DISCRETE, "compute", rate_tflops="{value='9', source='x'}"), "found '9'"),
        (change(DISCRETE, "compute", rate_tflops="{value=true, source='x'}"), "found True"),
        (change(DISCRETE, "compute", rate_tflops="{value=9}"), "rate_tflops: has no source"),
        (change(DISCRETE, "compute", rate_tflops="{value=9, source=' '}"), "has no source"),
        (change(DISCRETE, "compute", rate_tflops="{value=9, source=9}"), "has no source"),
        (change(DISCRETE, "compute", rate_tflops="{source='x'}"), "rate_tflops: expected {"),
        (change(DISCRETE, "compute", rate_tflops="9"), "compute.rate_tflops: expected {"),
        (change(DISCRETE, "compute", rate=9), "unknown key 'compute.rate'; did you mean"),
        (change(DISCRETE, "links", latency_us=9), "unknown section 'links'; did you mean 'link'"),
        (DISCRETE | {"fans": {}}, "unknown section 'fans'"),
        (DISCRETE | {"kinds": "disk"}, "unknown key 'kinds'; did you mean 'kind'"),
        (DISCRETE | {"kind": "discreet"}, "kind: unknown kind 'discreet'; did you mean"),
        (DISCRETE | {"model": "tabel"}, "model: unknown model 'tabel'; did you mean 'table'"),
        ({"model": "table"}, "kind: is missing, expected one of discrete, unified, disk"),
        (DISCRETE | {"loads_from": "memory"}, "loads_from: only a unified memory has it"),
        (DISCRETE | {"kind": "unified"}, "loads_from: is missing"),
        (UNIFIED | {"loads_from": "mapped"}, "unknown section 'link'"),
        (TABLE | {"kind": "unified", "loads_from": "memory"}, "'table' needs kind discrete"),
        (change(TABLE, "link", latency_us=1), "unknown section 'link'"),
        (DISCRETE | {"no_power": "why"}, "no_power: given although"),
        ({k: v for k, v in DISCRETE.items() if k != "power"}, "power: neither"),
        (
            change(UNIFIED, "link", bandwidth_gb_s=100.5),
            "found 100.5, expected at most 100: a copy",
        ),
        (
            change(UNIFIED | {"loads_from": "disk"}, "link", bandwidth_gb_s=201),
            "found 201, expected at most 200",
        ),
    ],
)
def test_a_bad_profile_is_refused_in_one_line(
    tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    with pytest.raises(CrispError) as caught:
        load(tmp_path, content)
    assert str(caught.value).startswith(f"{tmp_path / 'mine.toml'}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreadable_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(CrispError, match=r"none\.toml: cannot be read: No such file"):
        HardwareProfile.load(tmp_path / "none.toml")
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(CrispError, match=r"pipe\.toml: is not an ordinary file"):
        HardwareProfile.load(tmp_path / "pipe.toml")
    broken = tmp_path / "broken.toml"
    for content in (b"kind = ", b"\xff"):
        broken.write_bytes(content)
        with pytest.raises(CrispError, match=r"broken\.toml: is not TOML"):
            HardwareProfile.load(broken)
