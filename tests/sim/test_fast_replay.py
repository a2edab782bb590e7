"""The compiled replay of a cache follows rows as the one in Python does."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.policy.cache import CACHES
from crisp.profile import Profile
from crisp.scheduler.untimed import Replay
from crisp.sim.fast_replay import CompiledReplay, compiled_replay
from tests.sim.test_fast_simulate import GivenBlocks
from tests.sim.toys import GivenWidths

SPEC = ModelSpec.named("mixtral-8x7b").first_layers(3).with_(block=3584)  # 4 blocks an expert
CHOSEN = [name for name, rule in CACHES.items() if not rule.oracle]
PLAIN_ORDERS = ["fifo", "sequential", "widest", "narrowest", "resident-first", "random(3)"]


def made_profile(rng: np.random.Generator) -> Profile:
    counts = rng.integers(0, 50, (3, 8))
    return Profile(
        counts, np.zeros((3, 8, 8), np.int64), True,
        contributions=rng.random((3, 8, 4)).astype(np.float32),
        sensitivities=rng.random(3).astype(np.float32),
    )  # fmt: skip


@pytest.mark.seconds
@settings(max_examples=200)
@given(st.data())
def test_rows_and_counts_are_those_of_the_replay_in_python(data: st.DataObject) -> None:
    """Some rows of one layer at a time, as a window feeds them; or a token at a time, where the
    order of layers matters.
    """
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    cache = draw(st.sampled_from(CHOSEN))
    policy = named(
        "lru", cache=cache, order=draw(st.sampled_from(PLAIN_ORDERS)),
        scope=draw(st.sampled_from(["layer", "global"])),
        unit="block" if CACHES[cache].needs_blocks else draw(st.sampled_from(["expert", "block"])),
    )  # fmt: skip
    budget = Budget("x", Fraction(draw(st.integers(1, 10)), 10), None)
    profile, depends = made_profile(rng), draw(st.booleans())
    widths: Any = GivenBlocks() if depends else GivenWidths(tabled=True)
    both = [make(SPEC, policy, budget, profile) for make in (Replay, CompiledReplay)]
    for _ in range(draw(st.integers(1, 4))):
        rows = 1 if policy.cache.in_step else draw(st.integers(1, 6))
        for layer in range(3):
            experts = rng.random((rows, 8)).argsort(axis=1)[:, :3].astype(np.int16)
            experts[rng.random(rows) < 0.2, -1] = -1
            given_widths = rng.integers(0, 16 if depends else 5, experts.shape)
            asked = np.where(experts < 0, 0, given_widths + rng.integers(0, 4, experts.shape) / 4)
            asked, more = asked.astype(np.float16), None
            if draw(st.booleans()):
                more = np.ldexp(np.float16(1), rng.integers(-1, 2, experts.shape))
            found = [one.rows(layer, experts, asked, widths, more) for one in both]
            assert found[0].tolist() == found[1].tolist()
            assert found[0].dtype == found[1].dtype
            assert both[0].counts == both[1].counts


def test_what_cannot_be_compiled_is_followed_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that numba does not understand; an expert of more blocks than a word has bits."""
    policy, budget, profile = named("lru"), Budget.parse("50%"), Profile.empty(SPEC)
    assert isinstance(compiled_replay(SPEC, policy, budget, profile), CompiledReplay)
    many = SPEC.with_(block=16)
    assert isinstance(compiled_replay(many, policy, budget, Profile.empty(many)), Replay)

    def unknown(resident: Any, protected: Any, last: Any, count: Any, low: int, high: int) -> int:
        return min(range(low, high), key=lambda entry: str(entry))

    monkeypatch.setitem(CACHES, "own", replace(CACHES["lru"], victim=unknown))
    own = named("lru", cache="own")
    assert isinstance(compiled_replay(SPEC, own, budget, profile), Replay)
    with pytest.raises(CrispError, match="prefetch previous"):
        compiled_replay(SPEC, named("mo", has_guess=False), budget, profile)
