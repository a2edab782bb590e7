"""The error for a name nobody knows."""

from __future__ import annotations

from crisp.errors import CrispError, unknown_name

POLICIES = ["fo", "lru", "mo", "up", "crisp"]


def test_the_closest_name_is_offered_and_all_are_listed() -> None:
    error = unknown_name("crsip", POLICIES, "policy")
    assert isinstance(error, CrispError)
    assert str(error) == (
        "unknown policy 'crsip'; did you mean 'crisp'? known: fo, lru, mo, up, crisp"
    )


def test_no_name_is_offered_where_none_is_close() -> None:
    assert str(unknown_name("zzz", POLICIES, "policy")) == (
        "unknown policy 'zzz'; known: fo, lru, mo, up, crisp"
    )


def test_capitals_do_not_hide_the_closest_name() -> None:
    assert "did you mean 'lru'?" in str(unknown_name("LRU", POLICIES, "policy"))
