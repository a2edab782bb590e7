"""Everything a trace promises about its rows, broken one by one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.trace import check
from crisp.trace.check import half_weights

# The fixture's trace: 12 rows, 3 layers, top-2 of 8; sequences 5, 7, 9 of 4 rows; positions 7 to
# 10, the first two of each prefill. So row 6 is sequence 7, position 9, decode.
PLACE = "row 6 (sequence 7, position 9)"


@pytest.mark.parametrize("entries", [1 << 20, 1])  # all rows at once, or one row at a time
@pytest.mark.parametrize(
    ("tensor", "index", "value", "message"),
    [
        ("experts", (6, 1, 0), 8, f"{PLACE}, layer 1: expert 8 found; expected 0 to 7"),
        ("experts", (6, 1, 1), -2, f"{PLACE}, layer 1: expert -2 found; expected 0 to 7"),
        ("experts", (6, 1), [3, 3], f"{PLACE}, layer 1: experts [3, 3]; 3 twice"),
        ("experts", (6, 1), [-1, 3], f"{PLACE}, layer 1: experts [-1, 3]; absent ones (-1) must"),
        ("guess", (6, 2, 0), 9, f"{PLACE}, layer 2: guessed expert 9 found; expected 0 to 7"),
        ("guess", (6, 2), [4, 4], f"{PLACE}, layer 2: guessed experts [4, 4]; 4 twice"),
        ("weights", (6, 1, 0), np.nan, f"{PLACE}, layer 1: weight nan found; expected a finite"),
        ("weights", (6, 1, 1), np.inf, f"{PLACE}, layer 1: weight inf found; expected a finite"),
        ("weights", (6, 1, 1), -0.5, f"{PLACE}, layer 1: weight -0.5 found; expected a finite"),
        ("weights", (6, 1), [0.25, 0.5], f"{PLACE}, layer 1: weights [0.25, 0.5] rise"),
        ("scores", (6, 1, 7), np.nan, f"{PLACE}, layer 1: score nan of expert 7 found; expected"),
        ("scores", (6, 1, 7), -np.inf, f"{PLACE}, layer 1: score -inf of expert 7 found"),
        ("magnitudes", (6, 1, 1), 0, f"{PLACE}, layer 1: magnitude 0.0 found; expected a finite"),
        ("magnitudes", (6, 1, 0), -1, f"{PLACE}, layer 1: magnitude -1.0 found"),
        ("magnitudes", (6, 1, 0), np.inf, f"{PLACE}, layer 1: magnitude inf found"),
        ("phase", 6, 2, f"{PLACE}: phase 2 found; expected 0 (prefill) or 1 (decode)"),
        ("phase", 5, 1, f"{PLACE}: prefill after decode"),
        ("position", 6, 11, "row 6 (sequence 7, position 11): comes after position 8; positions"),
        ("position", 6, 8, "row 6 (sequence 7, position 8): comes after position 8; positions"),
        ("position", 0, -1, "row 0 (sequence 5, position -1): position is negative"),
        ("sequence", 0, -1, "row 0 (sequence -1, position 7): sequence is negative"),
        ("sequence", slice(8, 12), 3, "row 8 (sequence 3, position 7): comes after sequence 7"),
    ],
)
def test_a_broken_row_is_named(
    make, monkeypatch, entries: int, tensor: str, index, value, message: str
) -> None:
    trace = make(
        guess=make(seed=1).experts, scores=np.zeros((12, 3, 8), np.float16),
        magnitudes=np.ones((12, 3, 2), np.float16),
    )  # fmt: skip
    if message.endswith("decode"):
        trace.phase[6] = 0
    getattr(trace, tensor)[index] = value
    monkeypatch.setattr(check, "_ENTRIES", entries)
    with pytest.raises(CrispError) as caught:
        trace.validate("t")
    assert str(caught.value).startswith(f"t: {message}")


def test_rising_weights_are_fine_where_no_order_is_claimed(make) -> None:
    trace = make(header={"ordered": False})
    trace.weights[6, 1] = [0.25, 0.5]
    trace.validate("t")


def test_what_is_allowed(make) -> None:
    trace = make(guess=make(seed=1).experts)
    trace.experts[:, 0] = -1  # a dense layer
    trace.experts[3, 1, 1] = -1  # an absent expert ...
    trace.weights[3, 1] = [0.25, 0.5]  # ... whose weight means nothing
    trace.guess[:, :2] = -1
    trace.weights[4, 1] = [0.25, 0.25]
    trace.weights[5, 1] = [0.0, -0.0]
    trace.phase[:] = 0
    trace.validate("t")


def test_absent_weights_must_still_be_numbers(make) -> None:
    trace = make()
    trace.experts[3, 1, 1] = -1
    trace.weights[3, 1, 1] = np.nan
    with pytest.raises(CrispError, match="weight nan"):
        trace.validate("t")


def test_every_pair_of_ranks_is_compared(make) -> None:
    for first in range(4):
        for second in range(first):
            trace = make(k=4)
            trace.experts[2, 2, first] = trace.experts[2, 2, second]
            with pytest.raises(CrispError, match="twice"):
                trace.validate("t")


def test_missing_optional_tensors_are_fine(make) -> None:
    dataclasses.replace(make(), weights=None).validate("t")


def test_a_header_that_is_no_unicode_text(make, tmp_path) -> None:
    """A file name that is not UTF-8 reaches Python with lone surrogates; no file could hold it."""
    trace = make(header={"dataset": "a\udce9.txt"})
    with pytest.raises(CrispError, match=r"header: dataset 'a\\udce9\.txt' is not Unicode text"):
        trace.save(tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_scores_are_any_finite_numbers_of_all_experts(make) -> None:
    """The experts of a row need not be those of its largest scores: a router may add a bias."""
    scores = np.random.default_rng(0).normal(0, 90, (12, 3, 8)).astype(np.float16)
    make(scores=scores).validate("t")
    with pytest.raises(CrispError, match="t: scores are of 7 experts; expected n_experts, 8"):
        make(scores=scores[..., :7]).validate("t")
    with pytest.raises(CrispError, match=r"t: scores is float16 \[12, 2, 8\]; expected float16"):
        make(scores=scores[:, :2]).validate("t")
    with pytest.raises(CrispError, match=r"t: scores is float32 \[12, 3, 8\]; expected float16"):
        make(scores=scores.astype(np.float32)).validate("t")


def test_weights_beyond_float16_are_named_and_others_kept() -> None:
    weights = np.array([[1.0, 65_504.0], [np.inf, np.nan]])
    assert half_weights(weights, str).tolist()[0] == [1.0, 65_504.0]
    with pytest.raises(CrispError, match=r"^row 1: weight 65505 found; expected at most 65,504"):
        half_weights(np.array([[1.0], [65_505.0]]), lambda row: f"row {row}")
