"""Widths and retention by saliency: facts worked out by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, Cache, named
from crisp.policy.retention import ONE, block_sizes, expected_weights, fade, routed_weights
from crisp.policy.widths.saliency import Saliency
from crisp.profile import Profile
from crisp.profile.router_weights import QUANTILES
from crisp.scheduler.residency import StartingState, Worth
from crisp.scheduler.scheduler import EventScheduler
from crisp.scheduler.tasks import Task
from crisp.scheduler.untimed import Replay
from tests.sim.toys import Toy

CONTRACT = Path(__file__).parents[3] / "docs" / "contract.md"
MIXTRAL = ModelSpec.named("mixtral-8x7b").first_layers(2)
FOUR = MIXTRAL.with_(block=3584)  # 4 blocks


def scheduler(room: int, expected: list[int], sizes: list[list[int]]) -> EventScheduler:
    """Of one layer; sizes [experts][blocks]."""
    spec = Toy([[[0]]], [[[1]]], len(expected), len(sizes[0])).spec()
    start = StartingState([room], worth=Worth(expected, [size for own in sizes for size in own]))
    policy = replace(named("fo"), cache=Cache("saliency", unit="block"))
    return EventScheduler(spec, policy, start, granularity="expert", cost=None)


def run(made: EventScheduler, routed: dict[int, int], widths: dict[int, int]) -> list[str]:
    """Run an event; return its loads, as they are written in docs/contract.md."""
    made.start(0, [Task(e, [w]) for e, w in widths.items()], (),
               [(e, weight, weight) for e, weight in routed.items()])  # fmt: skip
    loads, transient = [], []
    while not made.done:
        load = made.next_load()
        if load is not None:
            assert load.task is not None
            assert not load.evicted
            last = load.first + load.blocks
            loads.append(f"{load.expert}[{load.first}:{last}]")
            if load.task.transient < last:
                transient.append(f"{load.expert}[{max(load.first, load.task.transient)}:{last}]")
            made.loaded(load)
        task = made.next_compute()
        if task is not None:
            made.computed(task)
    return [", ".join(loads), ", ".join(transient)]


def kept(made: EventScheduler) -> dict[int, int]:
    return {expert: n for expert, n in enumerate(made.residency.resident) if n}


def test_the_example_of_the_contract() -> None:
    section = CONTRACT.read_text().split("### An example of rule 24")[1].split("\n25. ")[0]
    given = json.loads(section.split("```json")[1].split("```")[0])
    rows = re.findall(r"^\| \d.*\|$", section, re.MULTILINE)
    made = scheduler(given["capacity"], given["expected"], given["sizes"])
    residency: Any = made.residency
    for event, row in zip(given["events"], rows, strict=True):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        _, recent, saliency, goes, leaves, loads, after = cells
        before = list(residency.resident)
        routed, widths = (
            {int(expert): value for expert, value in event[name].items()}
            for name in ("routed", "widths")
        )
        loaded, transient = run(made, routed, widths)
        assert [str(weight) for weight in residency.recent] == recent.split()
        there = [max(before[expert], widths.get(expert, 0)) for expert in range(3)]
        weights = [
            3 * wide + 7 * new
            for wide, new in zip(given["expected"], residency.recent, strict=True)
        ]
        worth = [[weights[e] * size for size in given["sizes"][e][: there[e]]] for e in range(3)]
        assert ", ".join(" ".join(map(str, own)) for own in worth if own) == saliency
        lost = [(worth[e][b], f"{e}[{b}]") for e in range(3) for b in range(there[e])
                if b >= residency.resident[e]]  # fmt: skip
        assert " ".join(block for _, block in sorted(lost)) == goes
        gone = [f"{gone.expert}[{gone.first}:{gone.last}]" for gone in made.evicted]
        assert ", ".join(gone) == leaves
        assert loads == (f"{loaded} \\| {transient}" if transient else loaded)
        assert " ".join(f"{e}:{n}" for e, n in kept(made).items()) == after


def test_ties_go_to_the_lowest_entry() -> None:
    made = scheduler(2, [10, 10, 10], [[1], [1], [1]])
    run(made, {0: 0, 1: 0, 2: 0}, {0: 1, 1: 1, 2: 1})
    assert kept(made) == {1: 1, 2: 1}


def test_of_what_the_event_reads_an_experts_worth_may_go() -> None:
    """One block an expert: of 0 and 1, which are read, one may go, although 2 and 3 are better."""
    made = scheduler(2, [1, 2, 50, 40], [[1], [1], [1], [1]])
    run(made, {0: 0, 1: 0}, {0: 1, 1: 1})
    assert kept(made) == {0: 1, 1: 1}
    both = dict.fromkeys(range(4), 1)
    assert run(made, {}, both) == ["2[0:1], 3[0:1]", "3[0:1]"]
    assert made.hits == 2
    assert kept(made) == {1: 1, 2: 1}
    run(made, {}, both)  # and the next event may let the other one go
    assert kept(made) == {2: 1, 3: 1}


def test_recent_weights_forget_a_tenth_and_floor() -> None:
    recent = [100, 19, 9, 1, 0, 77]
    fade(recent, 0, 5)
    assert recent == [90, 17, 8, 0, 0, 77]


def test_routed_weights_are_means_over_the_rows_of_an_event_and_the_largest() -> None:
    """-1 is no expert; a row that does not route to an expert counts as 0."""
    weights = np.array([[0.75, 0.25], [0.5, 1], [20, -1]], np.float16)
    assert routed_weights([[3, 1], [1, -1], [2, 0]], weights) == [
        (3, 3 * ONE // 4 // 3, 3 * ONE // 4), (1, 3 * ONE // 4 // 3, ONE // 2),
        (2, 16 * ONE // 3, 16 * ONE), (0, 0, 0),
    ]  # fmt: skip
    third = ONE // 3
    assert routed_weights([[3, 1, 0], [1, 2, -1]], None) == [
        (3, third // 2, third), (1, 2 * third // 2, third), (0, third // 2, third),
        (2, third // 2, third),
    ]  # fmt: skip


def profile(
    weights: tuple[float, float] = (0.5, 0.5), sensitivities: Any = (1.0, 1.0), **more: Any
) -> Profile:
    """Two layers of eight experts, of four blocks; 0 and 1 are all that tokens are routed to, as
    often. weights: the router's, in each layer.
    """
    counts = np.zeros((2, 8), np.int64)
    counts[:, :2] = 10
    router = np.ones((2, 8, QUANTILES), np.float16)
    router[:] = np.array(weights, np.float16)[:, None, None]
    made = Profile(
        counts, np.zeros((2, 8, 8), np.int64), True, None, router,
        np.tile(np.array([8, 4, 2, 1], np.float32), (2, 8, 1)),
        sensitivities=None if sensitivities is None else np.array(sensitivities, np.float32),
    )  # fmt: skip
    return replace(made, **more)


def test_a_threshold_is_shared_by_layers() -> None:
    """Worths in layer 0 are 4 2 1 .5, in layer 1, four times as sensitive, 16 8 4 2: of both the
    greatest half are 16 8 4 4, of which three are layer 1's.
    """
    bound = Saliency(Fraction(1, 2)).bind(FOUR, profile(sensitivities=(1, 4)), True)
    weights, nothing = np.array([[0.5, 0.25]], np.float16), [0] * 8
    experts = np.array([[0, 1]], np.int16)
    found = [bound.widths(layer, experts, weights, nothing).tolist() for layer in (0, 1)]
    assert found == [[[1, 0]], [[3, 2]]]
    assert bound.widths(0, experts, weights, [2, 3, *nothing[2:]]).tolist() == [[2, 3]]


def test_a_share_of_0_loads_nothing() -> None:
    policy = named("saliency", width="saliency(0)", rescale="none")
    replay = Replay(FOUR, policy, Budget.parse("50%"), profile())
    widths = policy.width.bind(FOUR, profile(), True)
    experts, weights = np.array([[0, 1]], np.int16), np.array([[16, 16]], np.float16)
    found = widths.widths(0, experts, weights, replay.resident(0))
    assert found.tolist() == [[0, 0]]
    replay.run(0, [], routed_weights([[0, 1]], weights))
    assert replay.scheduler.blocks_loaded == 0


def test_expected_weights_and_sizes_of_a_profile() -> None:
    """Half of top-2 tokens' two places are each expert's: every token has it, with its weight."""
    found = expected_weights(FOUR, profile((0.5, 0.25)))
    assert found == 2 * [ONE // 2] + 6 * [0] + 2 * [ONE // 4] + 6 * [0]
    assert expected_weights(FOUR, profile(router_weights=None))[:3] == [ONE // 2, ONE // 2, 0]
    sizes = block_sizes(FOUR, profile(sensitivities=(1, 4)))
    assert sizes[:4] == [1 << 28, 1 << 27, 1 << 26, 1 << 25]
    assert sizes[32:36] == [1 << 30, 1 << 29, 1 << 28, 1 << 27]
    assert block_sizes(FOUR, profile(sensitivities=None))[32:34] == [1 << 30, 1 << 29]
    assert set(block_sizes(FOUR, profile(contributions=None))) == {1 << 30}


def test_refusals() -> None:
    for given, what in (
        (profile(contributions=None), "asks what each block contributes"),
        (profile(sensitivities=None), "asks how sensitive each layer is"),
    ):
        with pytest.raises(CrispError, match=f"^width saliency: {what}"):
            Saliency().bind(FOUR, given, True)
    with pytest.raises(CrispError, match=r"^cache saliency: needs unit block, found expert$"):
        Cache("saliency")
