"""What blocks of predicted experts are worth: facts worked out by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Cache, Prefetch, named
from crisp.policy.anticipation import LEAST, Anticipation, anticipation
from crisp.policy.retention import ONE
from crisp.profile import Profile
from crisp.scheduler.predictions import Prediction
from crisp.scheduler.prefetch_queue import PrefetchQueue
from crisp.scheduler.residency import Residency, StartingState
from tests.sim.toys import Toy

CONTRACT = Path(__file__).parents[3] / "docs" / "contract.md"
FOUR = ModelSpec.named("mixtral-8x7b").first_layers(2).with_(block=3584)  # 4 blocks
POLICY = named("saliency", prefetch="saliency(guess)")


def test_the_example_of_the_contract() -> None:
    section = CONTRACT.read_text().split("### An example of rule 25")[1].split("\n## ")[0]
    given = json.loads(section.split("```json")[1].split("```")[0])
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in re.findall(r"^\| \d.*\|$", section, re.MULTILINE)
    ]
    assert len(rows) == 4
    sizes, weights = given["sizes"], given["weights"]
    spec = Toy([[[0]]], [[[1]]], 3, 3).spec()
    residency = Residency(spec, Cache("none"), StartingState([0], given["resident"]))
    whole = [int(size * ONE) for own in sizes for size in own]
    queue = PrefetchQueue(spec, residency, Anticipation(whole, [[0]]))
    queue.predict(Prediction(0, [2, 1, 0], [int(weights[expert] * ONE) for expert in (2, 1, 0)]))
    here = list(given["resident"])
    for _, worths, takes in rows:
        shown = [f"{e}[{b}] {weights[e] * sizes[e][b]}" for e, b in enumerate(here)]
        assert worths == ", ".join(shown)
        load = queue.next()
        assert takes == (f"{load.expert}[{load.first}]" if load is not None else "")
        if load is not None:
            queue.landed(load)
            here[load.expert] += 1


def profile(weights: Any, counts: tuple[int, int], contributions: Any, **more: Any) -> Profile:
    """Two layers alike of eight experts, of which tokens are routed to the first two.

    weights: of each of the two at all quantiles; contributions: of the blocks of every expert.
    """
    of_layer = np.zeros((8, 32), np.float16)
    of_layer[:2] = np.reshape(weights, (2, -1))
    found = np.zeros((2, 8), np.int64)
    found[:, :2] = counts
    return Profile(
        found, np.zeros((2, 8, 8), np.int64), True,
        router_weights=np.stack([of_layer] * 2),
        contributions=np.broadcast_to(np.array(contributions, np.float32), (2, 8, 4)).copy(),
        sensitivities=np.array(more.pop("sensitivities", (1, 1)), np.float32), **more,
    )  # fmt: skip


def test_weights_by_rank_are_means_of_equal_parts() -> None:
    """Expert 0 weighs 3/4 or 1/2, half of the time each; expert 1, a third as frequent, 1/4.

    Of 8 weights 3 are 3/4, 3 are 1/2 and 2 are 1/4; the first four sum to 11/4, the others to 3/2.
    """
    weights = [[0.75] * 16 + [0.5] * 16, [0.25] * 32]
    made = anticipation(FOUR, POLICY, profile(weights, (6, 2), [4, 3, 2, 1]))
    assert made.by_rank == [[11 * ONE // 16, 3 * ONE // 8]] * 2
    assert made.weighed(0, [5, -1, 3, 5, -1, 2]) == [
        (5, 11 * ONE // 16), (3, 11 * ONE // 16), (2, 3 * ONE // 8),
    ]  # fmt: skip


def test_relative_sizes_are_thresholds() -> None:
    """One weight, 1/2: half of all blocks are worth loading, those of 2 and more in layer 1, which
    is twice as sensitive, and of 4 in layer 0. The threshold is 1/2 x 4.
    """
    told = profile([[0.5] * 32] * 2, (1, 1), [4, 3, 2, 1], sensitivities=(1, 2))
    made = anticipation(FOUR, POLICY, told)
    assert made.sizes[:4] == [2 * ONE, 3 * ONE // 2, ONE, ONE // 2]
    assert made.sizes[-4:] == [4 * ONE, 3 * ONE, 2 * ONE, ONE]
    worth = [ONE // 2 * size >= LEAST for size in made.sizes]
    assert worth == [True, False, False, False] * 8 + [True, True, True, False] * 8


def test_sizes_where_nothing_or_everything_is_worth_loading() -> None:
    told = profile([[0.5] * 32] * 2, (1, 1), [4, 3, 2, 0])
    nothing = named("saliency", width="saliency(0)", prefetch="saliency(previous)")
    assert set(anticipation(FOUR, nothing, told).sizes) == {0}
    everything = replace(nothing, width=named("saliency", width="saliency(1)").width)
    assert set(anticipation(FOUR, everything, told).sizes) == {1 << 32}  # the threshold is 0
    blank = replace(told, expert_counts=np.zeros_like(told.expert_counts))
    assert anticipation(FOUR, nothing, blank).by_rank == [[0, 0]] * 2


def test_other_widths_are_refused() -> None:
    told = profile([[0.5] * 32] * 2, (1, 1), [4, 3, 2, 1])
    for width in ("full", "contribution", "resident"):
        policy = replace(named("saliency", width=width), prefetch=Prefetch("saliency(guess)"))
        with pytest.raises(CrispError) as caught:
            anticipation(FOUR, policy, told)
        assert str(caught.value) == (
            "prefetch saliency(guess): asks what a block must be worth to be loaded; width "
            f"saliency or contribution-resident was expected, found {width}"
        )
    with pytest.raises(CrispError, match=r"^unknown prefetch 'saliency'.*saliency\(guess\)"):
        named("saliency", prefetch="saliency")
