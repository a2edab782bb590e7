"""What is of decoding and what of prompts, by hand, whoever recorded it and whenever."""

from __future__ import annotations

import numpy as np
import pytest

from crisp.hardware.energy import Energy, Spans, StateDurations
from crisp.run.metrics.older import MIXED, in_todays_names
from crisp.run.metrics.phases import OF_ONE_PHASE, OF_PHASES, phase_metrics, sums_of_phases
from crisp.run.timeline import COMPUTE, LAYER, LOAD, PREFETCH, StepLog, TimelineTotals
from crisp.scheduler.workload import Step
from crisp.trace import DECODE, PREFILL

# A prompt of three tokens in one step, and two decoded ones: (step, kind, start, end).
ROWS = [
    (0, LAYER, 0, 6), (0, LOAD, 6, 16), (0, COMPUTE, 16, 30),
    (1, LAYER, 30, 34), (1, PREFETCH, 26, 34), (1, COMPUTE, 34, 38),
    (2, LAYER, 38, 40), (2, LOAD, 40, 45), (2, COMPUTE, 45, 50),
]  # fmt: skip
STEPS = [
    (Step([0, 1, 2], PREFILL, True, True), 30, 3000),  # when it ends, bytes issued until then
    (Step([3], DECODE), 38, 3000),
    (Step([4], DECODE), 50, 3400),
]
WHOLE = {"compute": 23, "layer": 12, "link": 23, "compute_hidden": 4, "layer_hidden": 4}


def joules(states: StateDurations, spans: Spans | None = None) -> Energy:
    """2 J for each ns of the link alone, 3 of compute alone, 4 of both; at rest 1."""
    gross = states.idle + 2 * states.link + 3 * states.compute + 4 * states.both
    return Energy(gross, gross - states.total, "made up", "test")


def totals(*cuts: int) -> TimelineTotals:
    """Of the timeline, handed on in pieces that end before these rows."""
    rows = np.zeros((len(ROWS), 11), np.int64)
    for place, (step, kind, start, end) in enumerate(ROWS):
        rows[place, [0, 3, 7, 8]] = step, kind, start, end
    sums, begin = TimelineTotals(), 0
    for cut, now, since in [(cut, ROWS[cut][2], 26 if cut == 3 else None) for cut in cuts]:
        sums.add(rows[begin:cut], now, since)
        begin = cut
    sums.add(rows[begin:], 50, None)
    return sums


def log() -> StepLog:
    made = StepLog()
    for step, end, n_bytes in STEPS:
        made.add(step, end, n_bytes)
    return made


@pytest.mark.parametrize("cuts", [(), (3,), (6,), (3, 6)])
def test_three_prompt_tokens_and_two_decoded_ones(cuts: tuple[int, ...]) -> None:
    """The prompt: 6 ns layers, 10 waiting for a load, 14 computing, 4 of them beside a prefetch,
    whose other 4 ns are the next step's. Decoding: 6 ns layers, 9 computing, 5 waiting.
    """
    sums = totals(*cuts)
    assert {name: getattr(sums, name) for name in WHOLE} == WHOLE
    decoding = np.array([False, True, True])
    assert sums.prompt_times(decoding) == (9, 6, 5, 9, 4)  # counted, not what is left over
    phases = sums_of_phases(log(), sums, 50, 3400)
    assert phases["prefill"].times == (14, 6, 10, 14, 4)
    assert phases["decode"].times == (9, 6, 5, 9, 4)
    assert (phases["prefill"].spans, phases["decode"].spans) == (((0, 30),), ((30, 50),))
    metrics, why = phase_metrics(phases, joules(StateDurations(0, 15, 27, 8)), joules)
    assert {name: metrics[f"prefill_{name}"] for name in ("tokens", "ns")} == {
        "tokens": 3,
        "ns": 30,
    }
    assert {name: metrics[f"decode_{name}"] for name in ("tokens", "ns")} == {"tokens": 2, "ns": 20}
    expected = {  # of a prompt's token, of a decoded one
        "tokens_per_second": (3 / 30e-9, 2 / 20e-9),
        "ms_per_token": (10e-6, 10e-6),
        "bytes_per_token": (1000, 200),
        "load_ms_per_token": (14e-6 / 3, 4.5e-6),
        "compute_ms_per_token": (14e-6 / 3, 4.5e-6),
        "layer_ms_per_token": (2e-6, 3e-6),
        "stall_ms_per_token": (10e-6 / 3, 2.5e-6),
        # the link alone 10 ns, compute alone 16, both 4; the link alone 5, compute 11, both 4
        "energy_j_per_token": ((20 + 48 + 16) / 3, (10 + 33 + 16) / 2),
        "energy_net_j_per_token": ((84 - 30) / 3, (59 - 20) / 2),
    }
    for name, (prompt, decoded) in expected.items():
        assert metrics[f"prefill_{name}"] == pytest.approx(prompt, rel=1e-12), name
        assert metrics[f"decode_{name}"] == pytest.approx(decoded, rel=1e-12), name
    assert {name: metrics[name] for name in OF_ONE_PHASE} == dict.fromkeys(OF_ONE_PHASE)
    assert why["bytes_per_token"] == (
        "prompts and decoding were run: see decode_bytes_per_token and prefill_bytes_per_token"
    )


def test_of_one_phase_the_names_without_one_say_the_same() -> None:
    """The same intervals, all of decoded tokens: five of them."""
    made = StepLog()
    for step, end, n_bytes in STEPS:
        made.add(step._replace(phase=DECODE), end, n_bytes)
    phases = sums_of_phases(made, totals(), 50, 3400)
    metrics, why = phase_metrics(phases, "no meter", joules)
    assert metrics["bytes_per_token"] == metrics["decode_bytes_per_token"] == 680
    assert metrics["stall_ms_per_token"] == metrics["decode_stall_ms_per_token"] == 15 / 5 / 1e6
    assert metrics["energy_j_per_token"] is metrics["decode_energy_j_per_token"] is None
    assert why["energy_j_per_token"] == why["decode_energy_j_per_token"] == "no meter"
    assert (metrics["prefill_tokens"], metrics["prefill_ns"]) == (0, 0)
    assert metrics["prefill_ms_per_token"] is None
    assert why["prefill_ms_per_token"] == "no prefill rows were run"
    assert set(why) == {name for name, value in metrics.items() if value is None}


OLD = {
    "tokens": 5, "total_ns": 50, "link_busy": 0.46, "bytes_per_token": 680.0,
    "compute_ms_per_token": 4.6e-6, "layer_ms_per_token": 2.4e-6, "stall_ms_per_token": 3e-6,
    "energy_j_per_token": 28.6, "energy_net_j_per_token": None, "tokens_per_second": 1e8,
    "ms_per_token_mean": 1e-5, "prefill_tokens_per_second": None,
}  # fmt: skip


def test_of_an_old_file_of_one_phase_all_is_known() -> None:
    metrics, why = in_todays_names(OLD, {"energy_net_j_per_token": "no rest"}, "all")
    assert metrics["decode_bytes_per_token"] == metrics["bytes_per_token"] == 680
    assert (metrics["decode_tokens"], metrics["prefill_tokens"]) == (5, 0)
    assert (metrics["decode_ns"], metrics["link_ns"], metrics["stall_ns"]) == (50, 23, 15)
    assert metrics["decode_load_ms_per_token"] == pytest.approx(23 / 5 / 1e6)
    assert metrics["decode_tokens_per_second"] == 1e8
    assert metrics["energy_j"] == 143
    assert why["energy_net_j"] == why["decode_energy_net_j_per_token"] == "no rest"
    assert why["prefill_bytes_per_token"] == "no prefill rows were run"
    assert set(why) == {name for name, value in metrics.items() if value is None}


def test_of_an_old_file_of_both_phases_little_is_known() -> None:
    metrics, why = in_todays_names(OLD | {"prefill_tokens_per_second": 9e7}, {}, "all")
    assert (metrics["decode_tokens_per_second"], metrics["prefill_tokens_per_second"]) == (1e8, 9e7)
    known = {"decode_tokens_per_second", "prefill_tokens_per_second"}
    for name in {*OF_PHASES, *OF_ONE_PHASE} - known:
        assert metrics[name] is None
        assert why[name] == MIXED
    assert (metrics["compute_ns"], metrics["layer_ns"]) == (23, 12)


def test_todays_names_stay() -> None:
    metrics = {"decode_tokens": 3, "bytes_per_token": None}
    assert in_todays_names(metrics, {"bytes_per_token": "x"}, "all") == (
        metrics, {"bytes_per_token": "x"},
    )  # fmt: skip
