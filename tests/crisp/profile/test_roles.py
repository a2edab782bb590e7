"""Dominant experts, and how far two measures agree, by hand."""

from __future__ import annotations

import numpy as np

from crisp.profile.roles import agreement, dominant

NAN = np.nan


def test_dominant_costs_more_and_is_unknown_where_nothing_says_so() -> None:
    """{0, 1}: 1 costs more; {0, 2}: equal; {0, 3}: one not measured; {1, 2}: both gain, 1 less."""
    increase = np.full((2, 4, 4), NAN, np.float32)
    increase[1, 0, 1], increase[1, 1, 0] = 0.5, 2
    increase[1, 0, 2] = increase[1, 2, 0] = 1
    increase[1, 0, 3] = 9
    increase[1, 1, 2], increase[1, 2, 1] = -0.1, -0.2
    found = dominant(increase)
    assert found.dtype == np.int16 and (found[0] == -1).all()
    expected = [[-1, 1, -1, -1], [1, -1, 1, -1], [-1, 1, -1, -1], [-1, -1, -1, -1]]
    assert found[1].tolist() == expected


def test_agreement_of_a_measure_with_itself_and_its_opposite() -> None:
    increase = np.arange(16.0).reshape(1, 4, 4) ** 2
    increase[0, range(4), range(4)] = NAN
    same, opposite = agreement(increase, 3 * increase + 1), agreement(increase, -increase)
    assert (round(same.rank, 9), same.same, same.pairs) == (1, 1, 6)
    assert (round(opposite.rank, 9), opposite.same, opposite.pairs) == (-1, 0, 6)


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    """Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: 4.5 / sqrt(4.5 x 5)."""
    a, b = np.full((1, 3, 3), NAN), np.full((1, 3, 3), NAN)
    places = [0, 1, 0, 2], [1, 0, 2, 0]
    a[0][places], b[0][places] = [1, 5, 5, 7], [1, 2, 3, 4]
    assert round(agreement(a, b).rank, 6) == round(4.5 / np.sqrt(4.5 * 5), 6)


def test_nothing_in_common_is_no_agreement() -> None:
    a, b = np.full((1, 2, 2), NAN), np.zeros((1, 2, 2))
    found = agreement(a, b)
    assert found.pairs == 0 and np.isnan(found.rank) and np.isnan(found.same)
