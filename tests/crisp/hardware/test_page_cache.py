"""A disk behind a page cache, on the example of docs/contract.md and on a profile by hand."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from crisp.errors import CrispError
from crisp.hardware.measured import TimeCurve
from crisp.hardware.page_cache import PageCacheCost
from crisp.hardware.profile import HardwareProfile, cost_model
from crisp.model.spec import ModelSpec
from tests.sim.toys import Costs

CONTRACT = Path(__file__).parents[3] / "docs" / "contract.md"
DISK = """
kind = "disk"
model = "analytic"
no_power = "not measured"
[link]
bandwidth_gb_s = {{ value = 2, source = "here" }}
latency_us = {{ value = 10, source = "here" }}
[compute]
rate_tflops = {{ value = 1, source = "here" }}
launch_us = {{ value = 1, source = "here" }}
[memory]
bandwidth_gb_s = {{ value = 20, source = "here" }}
{more}
"""
PAGES = """[page_cache]
bandwidth_gb_s = { value = 8, source = "here" }
latency_us = { value = 1, source = "here" }
"""


def profile(folder: Path, more: str) -> HardwareProfile:
    path = folder / "here.toml"
    path.write_text(DISK.format(more=more))
    return HardwareProfile.load(path)


def test_the_contract_s_example() -> None:
    section = CONTRACT.read_text().split("### An example of rule 26")[1].split("\n## ")[0]
    disk = Costs(request=10, load_block=100, block_bytes=100)
    cached = TimeCurve((100, 200), (Fraction(12), Fraction(22)))
    cost = PageCacheCost(disk, cached, Fraction(1, 10), [100], 400)
    lines = re.findall(
        r"^\| (\d)\[(\d):(\d)\] \| (\d+) \| (\d+) \| (\d+) \| (.*) \|$", section, re.M
    )
    assert len(lines) == 5
    held = read = 0
    for expert, first, last, bytes_held, bytes_read, ns, after in lines:
        blocks = int(last) - int(first)
        assert cost.request(0, int(expert), int(first), blocks) == int(ns)
        held, read = held + int(bytes_held), read + int(bytes_read)
        assert (cost.cached_bytes, cost.read_bytes) == (held, read)
        assert " ".join(f"{e}[{b}]" for _, e, b in cost._blocks) == after
    # 800 bytes from the disk, whose bound is a request's time here, and 300 from the page cache
    assert cost.io_bound(1100) == 10 + 800 + 30
    assert cost.io_bound(500) == 50


def test_layers_differ_in_bytes_and_what_is_too_large_is_not_held() -> None:
    cached = TimeCurve((1, 2), (Fraction(1), Fraction(2)))
    cost = PageCacheCost(Costs(0, 1, block_bytes=1), cached, Fraction(1), [3, 8], 7)
    assert cost.request(0, 0, 0, 2) == 6  # of 3 bytes: both fit
    assert cost.request(1, 0, 0, 1) == 8  # of 8 bytes: does not, and nothing goes for it
    assert cost.request(1, 0, 0, 1) == 8
    assert cost.cached_bytes == 0
    cost.request(0, 0, 0, 2)
    assert cost.cached_bytes == 6


def test_a_profile_has_a_page_cache_only_where_it_has_the_rate(tmp_path: Path) -> None:
    spec = ModelSpec.named("mixtral-8x7b")
    plain = profile(tmp_path, "")
    with pytest.raises(CrispError, match=r"here has no section page_cache.*--read buffered"):
        plain.with_page_cache(10**9)
    assert plain.with_page_cache(None) == plain
    assert "page_cache" not in plain.to_dict()
    machine = profile(tmp_path, PAGES).with_page_cache(10**9)
    assert machine.to_dict()["page_cache"] == 10**9
    cost = cost_model(machine, spec)
    assert isinstance(cost, PageCacheCost)
    block = spec.block_bytes  # 44,040,192: 22,020,096 ns and 10 us from the disk
    assert cost.request(0, 1, 0, 1) == cost.load(block) == 22_030_096
    assert cost.request(0, 1, 0, 1) == 5_506_024  # 8 bytes a ns, and 1 us
    assert cost.request(0, 1, 0, 2) == 22_030_096 + 5_506_024
    assert cost_model(machine, spec).request(0, 1, 0, 1) == 22_030_096  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("[page_cache]\nlatency_us = { value = 1, source = 'x' }", "bandwidth_gb_s: is missing"),
        (PAGES.replace("8,", "0,"), "page_cache.bandwidth_gb_s: found 0, expected more than 0"),
        (PAGES.replace("latency_us", "latency"), "unknown key 'page_cache.latency'"),
    ],
)
def test_a_wrong_section_is_refused(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(CrispError, match=message):
        profile(tmp_path, more)


def test_only_a_disk_has_one(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text(DISK.format(more=PAGES).replace('kind = "disk"', 'kind = "discrete"'))
    with pytest.raises(CrispError, match="page_cache: only kind disk has one, found discrete"):
        HardwareProfile.load(path)
