"""Numbers as users write them."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crisp.errors import CrispError
from crisp.units import format_bytes, parse_bytes, parse_fraction, parse_rate

DECIMALS = st.decimals(-1000, 1000, allow_nan=False, allow_infinity=False, places=6)


@given(DECIMALS)
def test_a_decimal_is_read_without_rounding(number: Decimal) -> None:
    assert parse_fraction(f"{number:f}") == Fraction(number)
    assert parse_fraction(f"{number:f}%") == Fraction(number) / 100


def test_a_tenth_is_a_tenth_and_not_the_float_next_to_it() -> None:
    assert parse_fraction(".1") * 10 == 1
    assert (
        parse_fraction("10%")
        == parse_fraction("0.10")
        == parse_fraction(" 1e-1 ")
        == Fraction(1, 10)
    )


def test_exact_numbers_pass_unchanged() -> None:
    assert parse_fraction(3) == 3
    assert parse_fraction(Fraction(1, 3)) == Fraction(1, 3)


@pytest.mark.parametrize(
    "text", ["", " ", "%", "ten", "nan", "inf", "-inf", "1/2", "0x10", "1,5", "1_000", "5%%", "--1"]
)
def test_what_is_no_number_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(CrispError, match=r"^--budget: .* is not a number") as caught:
        parse_fraction(text, "--budget")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("123", 123),
        ("123B", 123),
        ("4GB", 4_000_000_000),
        ("4 gb", 4_000_000_000),
        ("4GiB", 4 * 1024**3),
        ("512MiB", 512 * 1024**2),
        ("1kB", 1000),
        ("1.5TB", 1_500_000_000_000),
        (".5KiB", 512),
        ("1e3kB", 1_000_000),
        ("4.35GB", 4_350_000_000),  # as a float, 4.35e9 bytes less one
    ],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    "text",
    ["", "GB", "4 apples", "4PB", "4GBs", "10%", "4eB", "1..5GB", "4,5GB", "nan", "-4GB"],
)
def test_what_is_no_size_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(CrispError, match=r"^--budget: .* is not a size") as caught:
        parse_bytes(text, "--budget")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("parse", [parse_fraction, parse_bytes, parse_rate])
@pytest.mark.parametrize("text", ["9" * 5000, "1." + "0" * 5000 + "1", "9" * 5000 + "GB/s"])
def test_thousands_of_digits_are_refused_in_one_line(parse: Callable, text: str) -> None:
    with pytest.raises(CrispError, match=r"^--budget: '.{20}…' is not a (number|size)") as caught:
        parse(text, "--budget")
    assert len(str(caught.value)) < 100


def test_a_rate_is_a_byte_a_second_or_more() -> None:
    assert parse_rate("1B/s") == parse_rate("1") == 1
    for text in ("0.5B/s", "0", "0.0001kB/s"):
        with pytest.raises(CrispError, match=f"^rate: '{text}' is less than 1 byte a second$"):
            parse_rate(text)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (93_600_000, "93.6 MB"),
        (999_999, "1 MB"),
        (4 * 10**12, "4 TB"),
    ],
)
def test_bytes_are_shown_in_three_figures(n_bytes: int, text: str) -> None:
    assert format_bytes(n_bytes) == text
