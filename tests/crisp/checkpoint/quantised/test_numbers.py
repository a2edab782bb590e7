"""Small floats and packed integers against torch's own, and against each other."""

from __future__ import annotations

import numpy as np
import pytest

from crisp.checkpoint.quantised.numbers import StoredPart, pack, powers_of_two, unpack

torch = pytest.importorskip("torch", reason="needs the extra hf")

BYTES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2")]
)
def test_8_bit_floats_are_torchs(dtype: str, kind: str) -> None:
    ours = StoredPart(BYTES, dtype).floats()
    theirs = torch.from_numpy(BYTES).view(getattr(torch, kind)).float().numpy()
    finite = np.isfinite(theirs)
    assert (ours[finite].view(np.uint32) == theirs[finite].view(np.uint32)).all()
    assert not np.isfinite(ours[~finite]).any()


def test_powers_of_two_are_torchs() -> None:
    theirs = torch.from_numpy(BYTES[1:]).view(torch.float8_e8m0fnu).float().numpy()
    assert np.array_equal(powers_of_two(BYTES[1:]), theirs, equal_nan=True)
    assert powers_of_two(BYTES)[0] == 2.0**-127


def test_bfloat16() -> None:
    numbers = torch.tensor([1.5, -3.0, 1e-38])
    bits = numbers.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert StoredPart(bits, "BF16").floats().tolist() == numbers.to(torch.bfloat16).tolist()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_words_hold_the_lowest_bits_first(bits: int, axis: int) -> None:
    word = np.array([[0x76543210]], np.int32)
    numbers = unpack(word, bits, axis)
    assert numbers.ravel().tolist() == [
        0x76543210 >> shift & (1 << bits) - 1 for shift in range(0, 32, bits)
    ]
    assert pack(numbers, bits, axis).tolist() == word.tolist()
    many = np.random.default_rng(0).integers(-(2**31), 2**31, (6, 4)).astype(np.int32)
    assert (pack(unpack(many, bits, axis), bits, axis) == many).all()
