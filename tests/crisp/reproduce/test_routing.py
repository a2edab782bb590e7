"""The routing that is drawn for the claims."""

from __future__ import annotations

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.profile import Profile
from crisp.reproduce.measured import routing
from crisp.reproduce.routing import GENERATED, drawn, prompted
from crisp.trace import RoutingTrace
from crisp.trace.check import validate
from crisp.trace.describe import pair_shares


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    return drawn()


def test_a_drawn_trace_has_the_statistics(trace: RoutingTrace) -> None:
    validate(trace, "drawn")
    known, counts = routing(), Profile.from_trace(trace)
    shares = [pair_shares(counts, layer) for layer in range(32)]
    np.testing.assert_allclose(np.mean(shares, axis=0), known["pair_shares"], atol=0.004)
    same = trace.sequence[1:] == trace.sequence[:-1]
    before, after = trace.experts[:-1][same], trace.experts[1:][same]
    common = (before[..., :, None] == after[..., None, :]).sum(axis=(2, 3))
    found = [(common == n).mean() for n in range(3)]
    np.testing.assert_allclose(found, known["in_common"], atol=0.01)


def test_layers_have_their_own_frequent_pairs(trace: RoutingTrace) -> None:
    counts = Profile.from_trace(trace).pair_counts
    most = {int(layer.argmax()) for layer in counts}
    assert len(most) > 10


def test_a_prompt_and_what_follows(trace: RoutingTrace) -> None:
    found = prompted(trace, 100)
    validate(found, "prompted")
    assert found.rows == 100 + GENERATED
    assert found.phase.sum() == GENERATED
    np.testing.assert_array_equal(found.experts, trace.experts[: found.rows])
    with pytest.raises(CrispError, match="228 rows needed, found 200"):
        prompted(trace.select(slice(0, 200)), 100)
