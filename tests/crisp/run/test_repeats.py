"""How often a run is repeated, and what is known of its joules then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.run.repeats import (
    INTERRUPTED,
    NoMoreRunsError,
    StoppingRule,
    half_width,
    repeat,
    repeat_run,
)
from crisp.run.result import Run
from crisp.statistics import Interval, interval, t_quantile

NAMES = "energy_j", "energy_net_j"


@pytest.mark.parametrize(
    ("freedom", "printed"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (6, 2.447), (7, 2.365),
     (8, 2.306), (9, 2.262), (10, 2.228), (15, 2.131), (19, 2.093), (20, 2.086), (29, 2.045),
     (30, 2.042), (60, 2.000), (120, 1.980), (1000, 1.962)],
)  # fmt: skip
def test_the_quantiles_are_those_of_printed_tables(freedom: int, printed: float) -> None:
    assert t_quantile(freedom) == pytest.approx(printed, abs=5e-4)


def test_an_interval_by_hand() -> None:
    """The deviation of 9, 10 and 11 is 1; t of two degrees is 4.3027."""
    found = interval([9.0, 10.0, 11.0])
    assert (found.mean, found.n) == (10, 3)
    assert found.half_width == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert found.share == pytest.approx(0.248414, rel=1e-5)
    assert interval([7.0]) == Interval(7, None, 1)
    assert interval([7.0]).share is None
    assert interval([-1.0, 0.0, 1.0]).share is None  # of nothing there is no share


@pytest.mark.parametrize("n", [2, 3, 8])
def test_19_of_20_intervals_hold_the_truth(n: int) -> None:
    drawn = np.random.default_rng(0).normal(100, 5, (4000, n))
    found = [interval(list(row)) for row in drawn]
    held = [abs(one.mean - 100) <= (one.half_width or 0) for one in found]
    assert np.mean(held) == pytest.approx(0.95, abs=0.012)  # 3.5 deviations of such a count


def runs(*joules: float, ends: Callable[[], float] | None = None) -> Callable[[], float]:
    """Gives one after the other, then what ``ends`` does."""
    left: Iterator[float] = iter(joules)

    def again() -> float:
        for one in left:
            return one
        assert ends is not None, "one run too many"
        return ends()

    return again


def test_two_that_agree_are_not_enough() -> None:
    series = repeat(10.0, runs(10.0, 10.0), float, StoppingRule(0.05, 20))
    assert (series.items, series.ended) == ([10, 10, 10], "within 5 %")


def test_it_goes_on_until_the_interval_is_narrow() -> None:
    """9, 11, 10 are off by 25 %; with a fourth 10, by 3.182 x 0.8165 / 2 of 10: 13 %."""
    series = repeat(9.0, runs(11.0, 10.0, 10.0), float, StoppingRule(0.13, 20))
    assert len(series.items) == 4
    assert series.interval.half_width == pytest.approx(3.18245 * math.sqrt(2 / 3) / 2, rel=1e-5)
    assert series.ended == "within 13 %"


def test_but_not_beyond_the_most() -> None:
    series = repeat(9.0, runs(11.0, 10.0), float, StoppingRule(0.05, 3))
    assert (len(series.items), series.ended) == (3, "not within 5 % after 3 runs")
    assert not StoppingRule(0.05, 3).met(series.interval)
    plain = repeat(10.0, runs(10.0, 10.0, 10.0), float, StoppingRule(None, 4))
    assert (len(plain.items), plain.ended) == (4, "as many as were asked for")
    assert repeat(10.0, runs(), float, StoppingRule()).items == [10]


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (KeyboardInterrupt(), INTERRUPTED),
        (NoMoreRunsError("the meter is gone"), "the meter is gone"),
    ],
)
def test_what_was_run_before_an_end_stays(error: BaseException, ended: str) -> None:
    def ends() -> float:
        raise error

    series = repeat(9.0, runs(11.0, ends=ends), float, StoppingRule(0.01, 20))
    assert (series.items, series.interval.mean, series.ended) == ([9, 11], 10, ended)


def test_the_rule_of_options() -> None:
    assert StoppingRule.parse(None, None) == StoppingRule(None, 1)
    assert StoppingRule.parse("5%", None) == StoppingRule(0.05, 20)
    assert StoppingRule.parse(".1", 4) == StoppingRule(0.1, 4)
    assert StoppingRule.parse(None, 7) == StoppingRule(None, 7)
    for within, most, told in (
        ("5", None, "--energy-within 5: expected a share of the mean, such as 5%"),
        ("0%", None, "--energy-within 0%: expected a share of the mean, such as 5%"),
        ("wide", None, "--energy-within: 'wide' is not a number"),
        ("5%", 0, "--energy-repeats 0: expected 1 or more"),
    ):
        with pytest.raises(CrispError) as error:
            StoppingRule.parse(within, most)
        assert str(error.value) == told


def run(gross: float | None, net: float | None, why: str = "no", total: int = 7) -> Run:
    """Of 10 tokens."""
    metrics = dict(zip(NAMES, (gross, net), strict=True))
    energy = None if gross is None else {"method": "measured: x", "source": "y", "window_ns": 5,
                                         "uncertainty_j": 0.5}  # fmt: skip
    return Run(
        {"engine": "hw"},
        {"tokens": 10, "total_ns": total, **metrics},
        {name: why for name, value in metrics.items() if value is None},
        {"tool": "t", "energy": energy},
    )


def test_a_run_has_the_means_of_its_repeats() -> None:
    left = iter([run(3.0, 1.0, total=9), run(4.0, 3.0, total=9)])
    made, interrupt = repeat_run(run(2.0, 2.0), lambda: next(left), StoppingRule(None, 3))
    assert interrupt is None
    assert [made.metrics[name] for name in NAMES] == [3, 2]
    assert made.metrics["total_ns"] == 8  # 25 / 3, a whole number of ns
    assert (made.provenance["energy"]["method"], made.settings) == ("measured: x", {"engine": "hw"})
    repeats = made.provenance["repeats"]
    half = pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert repeats["half_width"]["energy_j"] == repeats["half_width"]["energy_net_j"] == half
    assert (repeats["runs"], repeats["reached"], repeats["within"]) == (3, False, None)
    assert repeats["each"] == {
        "total_ns": [7, 9, 9], "energy_j": [2, 3, 4], "energy_net_j": [2, 1, 3],
    }  # fmt: skip
    assert repeats["windows"][2] == {"joules": 4, "window_ns": 5, "uncertainty_j": 0.5}
    assert half_width(made, "energy_j") == half
    assert half_width(made, "tokens") == 0  # the same in all runs
    assert half_width(run(2.0, 1.0), "energy_j") is None


def test_a_run_without_joules_is_repeated_if_asked_for_without_them() -> None:
    """7, 9 and 11 ns: the deviation is 2, so 9 +- 4.3027 x 2 / sqrt(3)."""
    alone = run(None, None)
    assert repeat_run(alone, runs(), StoppingRule(0.05, 20)) == (alone, None)  # type: ignore[arg-type]
    left = iter([run(None, None, total=9), run(None, None, total=11)])
    rule = StoppingRule.parse(None, None, runs=3)
    made, _ = repeat_run(alone, lambda: next(left), rule)
    assert made.metrics == {"tokens": 10, "total_ns": 9, NAMES[0]: None, NAMES[1]: None}
    assert half_width(made, "total_ns") == pytest.approx(2 * 4.30265 / math.sqrt(3), rel=1e-5)
    assert made.provenance["repeats"]["ended"] == "as many as were asked for"
    known = run(2.0, 1.0)
    assert repeat_run(known, runs(), StoppingRule()) == (known, None)  # type: ignore[arg-type]


def test_how_often_is_said_once() -> None:
    with pytest.raises(CrispError, match="--repeats 3: not together with --energy-within or"):
        StoppingRule.parse("5%", None, runs=3)
    with pytest.raises(CrispError, match="--repeats 0: expected 1 or more"):
        StoppingRule.parse(None, None, runs=0)


def test_a_repeat_without_joules_does_not_count() -> None:
    left = iter([run(4.0, None, "no rest"), run(None, None, "gone")])
    made, _ = repeat_run(run(2.0, 1.0), lambda: next(left), StoppingRule(None, 9))
    assert [made.metrics[name] for name in NAMES] == [3, None]
    assert made.unavailable == {NAMES[1]: "no rest"}
    repeats = made.provenance["repeats"]
    assert (repeats["runs"], repeats["ended"]) == (2, "a repeat had no joules: gone")
    assert repeats["each"][NAMES[1]] == [1, None]


def test_ctrl_c_is_told() -> None:
    raised = KeyboardInterrupt()

    def stopped() -> Run:
        raise raised

    made, interrupt = repeat_run(run(2.0, 1.0), stopped, StoppingRule(None, 9))
    assert interrupt is raised
    assert made.metrics[NAMES[0]] == 2
    assert made.provenance["repeats"]["runs"] == 1
    assert half_width(made, NAMES[0]) is None
