"""The routing that is drawn for the claims."""

from __future__ import annotations

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.profile import Profile
from crisp.reproduce.measured import routing_statistics
from crisp.reproduce.routing import GENERATED, draw_trace, figure3_shares, with_prompt
from crisp.trace import RoutingTrace
from crisp.trace.describe import pair_shares


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    return draw_trace()


def test_a_drawn_trace_has_the_statistics(trace: RoutingTrace) -> None:
    trace.validate("drawn")
    known, counts = routing_statistics(), Profile.from_trace(trace)
    shares = [pair_shares(counts, layer) for layer in range(32)]
    np.testing.assert_allclose(np.mean(shares, axis=0), known["pair_shares"], atol=0.004)
    np.testing.assert_allclose(_common(trace), known["in_common"], atol=0.01)


def _common(trace: RoutingTrace) -> list[float]:
    """Shares of tokens that have 0, 1 and 2 experts in common with the one before."""
    same = trace.sequence[1:] == trace.sequence[:-1]
    before, after = trace.experts[:-1][same], trace.experts[1:][same]
    common = (before[..., :, None] == after[..., None, :]).sum(axis=(2, 3))
    return [float((common == n).mean()) for n in range(3)]


def test_shares_as_unequal_as_figure_3() -> None:
    given = routing_statistics()["pair_shares"]
    found = figure3_shares(given)
    assert found == sorted(found, reverse=True)
    assert sum(found) == pytest.approx(1)
    assert sum(found[:7]) == pytest.approx(0.60)  # 25 % of 28 pairs
    assert 0.09 < sum(found[-8:]) <= 0.10 + 1e-9  # 29 %; sorted anew, they take no more
    assert found[0] / found[1] == pytest.approx(given[0] / given[1])


def test_a_skewed_trace_has_them_and_follows_itself_as_the_other(trace: RoutingTrace) -> None:
    skewed = draw_trace(skewed=True)
    counts = Profile.from_trace(skewed)
    shares = np.mean([pair_shares(counts, layer) for layer in range(32)], axis=0)
    assert shares[:7].sum() == pytest.approx(0.60, abs=0.01)
    assert _common(skewed) == pytest.approx(_common(trace), abs=0.01)


def test_layers_have_their_own_frequent_pairs(trace: RoutingTrace) -> None:
    counts = Profile.from_trace(trace).pair_counts
    most = {int(layer.argmax()) for layer in counts}
    assert len(most) > 10


def test_a_prompt_and_what_follows(trace: RoutingTrace) -> None:
    found = with_prompt(trace, 100)
    found.validate("prompted")
    assert found.rows == 100 + GENERATED
    assert found.phase.sum() == GENERATED
    np.testing.assert_array_equal(found.experts, trace.experts[: found.rows])
    with pytest.raises(CrispError, match="228 rows needed, found 200"):
        with_prompt(trace.select(slice(0, 200)), 100)
