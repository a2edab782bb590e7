"""BigMoeOnEdge's published figures, from its route traces, to the decimal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.logs.published import MODELS, Metrics
from benchmarks.logs.times import time_fits


@pytest.fixture(scope="module")
def figures(shared: Path) -> list[dict[str, Any]]:
    from benchmarks.logs.reproduction import reproduce

    return reproduce(shared, curves=False)


@pytest.mark.seconds
def test_hits_and_bytes_of_the_three_models(figures: list[dict[str, Any]]) -> None:
    assert [round(one["hit"][1], 2) for one in figures] == [32.41, 74.88, 76.78]
    assert [round(one["hit"][1], 3) for one in figures] == [32.408, 74.880, 76.784]
    for one, model in zip(figures, MODELS, strict=True):
        assert one["hit"][0] == model.hit_percent
        assert round(one["mib"][0], 2) == model.mib_per_token
        # the trace does not say where an expert begins within a page
        assert abs(one["mib"][1] - one["mib"][0]) < 0.007


@pytest.mark.seconds
def test_every_rate_and_flag(figures: list[dict[str, Any]]) -> None:
    for equal, of, number in (("rates_equal", "tokens", 320), ("flags_equal", "flags", 64512)):
        assert sum(one[equal] for one in figures) == sum(one[of] for one in figures) == number


@pytest.mark.slow
def test_every_cell_of_the_replay_curves(shared: Path) -> None:
    from benchmarks.logs.reproduction import reproduce

    cells = [cell for one in reproduce(shared) for cell in one["curve"]]
    assert len(cells) == 165 and all(cell["published"] == cell["found"] for cell in cells)


@pytest.mark.seconds
def test_wrong_readings_give_other_figures(figures: list[dict[str, Any]]) -> None:
    found = [[round(rate, 2) for rate in one["readings"].values()] for one in figures]
    assert found == [[44.68, 42.40, 32.41], [79.05, 76.68, 75.09], [80.00, 79.79, 76.79]]


@pytest.mark.seconds
def test_bytes_foretell_waiting_but_not_the_heat(figures: list[dict[str, Any]]) -> None:
    waiting = figures[1]["times"]["waiting"]
    assert round(waiting["whole_base_ms"], 1) == 6.9 and round(waiting["whole_slope"], 3) == 0.359
    for one in figures:
        assert abs(one["times"]["waiting"]["error"]) < 0.02
        assert 0.06 < one["times"]["computing"]["error"] < 0.26
        assert 0.03 < one["times"]["all"]["error"] < 0.23


def test_a_line_is_fitted_to_the_first_half() -> None:
    mib = np.array([1, 2, 3, 4, 1, 2, 3, 4])
    waiting = 5 + 2.0 * mib
    waiting[4:] *= 1.5
    compute = np.array([6.0, 8, 6, 8, 9, 9, 9, 9])
    fits = time_fits(
        Metrics(waiting + compute, waiting - 1, compute, np.ones(8), mib << 20, [""] * 8, 0, 0.0)
    )
    assert fits["waiting"]["base_ms"] == pytest.approx(5)
    assert fits["waiting"]["ms_per_mib"] == pytest.approx(2)
    assert fits["waiting"]["foretold_ms"] == pytest.approx(10)
    assert fits["waiting"]["error"] == pytest.approx(0.5)
    assert fits["computing"] == {
        "first_ms": pytest.approx(7), "foretold_ms": pytest.approx(7),
        "second_ms": pytest.approx(9), "error": pytest.approx(2 / 7),
        "typical": pytest.approx(2 / 9),
    }  # fmt: skip
    assert fits["all"]["error"] == pytest.approx((15 + 9) / (10 + 7) - 1)
