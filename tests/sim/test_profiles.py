"""The shipped hardware profiles, and the page that describes them."""

from __future__ import annotations

import doctest
import re
from fractions import Fraction
from pathlib import Path

import pytest

from crisp.errors import CrispError
from crisp.hardware.profile import Power, cost_model
from crisp.model.spec import BUILTIN
from crisp.sim.hardware import hardware_profile, hardware_profile_names

PAGE = Path(__file__).parents[2] / "docs" / "hardware.md"
MIXTRAL = BUILTIN["mixtral-8x7b"].with_(bits=Fraction("4.25"))


def test_all_four_are_found() -> None:
    assert hardware_profile_names() == [
        "jetson-agx-orin-32gb",
        "paper-figure5",
        "paper-table1",
        "rtx4090-pcie4",
    ]
    assert [
        hardware_profile(name).name for name in hardware_profile_names()
    ] == hardware_profile_names()


def test_a_path_is_a_profile_too(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "crisp/sim/profiles/paper-table1.toml"
    mine = tmp_path / "mine.toml"
    mine.write_text(shipped.read_text())
    assert hardware_profile(mine).name == "mine"
    assert hardware_profile(mine).numbers == hardware_profile("paper-table1").numbers


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(CrispError, match="hardware profile 'rtx4090'; did you mean 'rtx4090-pc"):
        hardware_profile("rtx4090")
    with pytest.raises(CrispError, match=r"other/mine\.toml: cannot be read"):
        hardware_profile("other/mine.toml")


@pytest.mark.parametrize(
    ("name", "load", "compute"),
    [("paper-table1", 5_600_000, 1_300_000), ("paper-figure5", 7_500_000, 800_000)],
)
def test_the_papers_tables(name: str, load: int, compute: int) -> None:
    table = hardware_profile(name)
    costs = cost_model(table, MIXTRAL)
    assert costs.load(MIXTRAL.expert_bytes) == load
    assert costs.compute(0, MIXTRAL.n_blocks, MIXTRAL.d_ff) == compute
    assert costs.layer(0, 1) == 600_000
    assert table.power is None
    assert table.no_power is not None
    assert "times only" in table.no_power


def test_table_1_gives_the_papers_layer_and_throughput() -> None:
    costs = cost_model(hardware_profile("paper-table1"), MIXTRAL)
    expert = costs.load(MIXTRAL.expert_bytes) + costs.compute(0, 8, MIXTRAL.d_ff)
    layer = costs.layer(0, 1) + 2 * expert
    assert layer == 14_400_000  # Table 1, total: 14.4 ms
    assert round(1e9 / (32 * layer), 4) == 2.1701  # the paper measures 2.1 tokens/s


def test_the_jetson_copies_within_its_memory() -> None:
    jetson = hardware_profile("jetson-agx-orin-32gb")
    costs = cost_model(jetson, MIXTRAL)
    assert (jetson.kind, jetson.loads_from) == ("unified", "memory")
    assert costs.memory_bandwidth == 204.8e9
    assert costs.load_traffic(100) == 200
    # a lone copy takes all of the memory's bandwidth: nothing is left for a computation beside it
    assert costs.load_traffic(10**9) / costs.io_bound(10**9) == pytest.approx(204.8)


def test_power_rises_with_what_is_busy() -> None:
    for name in ("rtx4090-pcie4", "jetson-agx-orin-32gb"):
        power = hardware_profile(name).power
        assert isinstance(power, Power)
        assert 0 < power.idle < power.link <= power.compute <= power.both


def test_derived_numbers_follow_from_their_sources() -> None:
    rtx, jetson = (
        hardware_profile("rtx4090-pcie4").numbers,
        hardware_profile("jetson-agx-orin-32gb").numbers,
    )
    assert rtx["link.bandwidth_gb_s"] == Fraction("205.04") / 8
    assert rtx["link.bandwidth_gb_s"] < 16 * 16 * Fraction(128, 130) / 8
    # full offloading: joules a token times tokens a second
    assert rtx["power.link_w"] == round(28.9 / (1 - 0.767) * 2.1)
    assert jetson["power.link_w"] == Fraction("7.5") * Fraction("5.2")
    assert jetson["link.bandwidth_gb_s"] == jetson["memory.bandwidth_gb_s"] / 2
    # 56 tensor cores, 512 dense FP16 operations a cycle (256 multiply-adds), 939 MHz
    assert jetson["compute.rate_tflops"] == round(56 * 512 * 939e6 / 1e12)
    assert jetson["power.idle_w"] == Fraction("2.399") + Fraction("0.400") + Fraction("4.032")


# -- the page ------------------------------------------------------------------------------------


def test_the_worked_examples_are_right() -> None:
    failures, examples = doctest.testfile(str(PAGE), module_relative=False)
    assert examples > 5
    assert failures == 0


@pytest.mark.parametrize("name", hardware_profile_names())
def test_the_page_lists_every_number(name: str) -> None:
    shown = dict(re.findall(rf"^\| {name} \| `([\w.]+)` \| ([\d.]+) \|", PAGE.read_text(), re.M))
    assert {key: Fraction(value) for key, value in shown.items()} == hardware_profile(name).numbers
