"""The table of launch parameters."""

from __future__ import annotations

import pytest

from crisp.hw.devices.gpu.kernels.launch import FEW, SHARED, TABLE, Launch, launch, shared_bytes
from crisp.hw.errors import DeviceError
from crisp.model.quantization import GROUP


def test_every_entry_has_its_stages_where_it_is_meant_to_run() -> None:
    for arch, kernels in TABLE.items():
        for name, entries in kernels.items():
            for bits, found in entries.items():
                kernel, form = name.split("_")
                operand = 32 if bits == 32 else 16
                assert shared_bytes(found, kernel, bits, operand) <= SHARED[arch]
                # a scale is of all columns, or the columns are of whole groups
                assert GROUP % found.columns == 0 or found.columns % GROUP == 0
                if form != "row":  # the least that tensor cores multiply
                    assert min(found.rows, found.neurons, found.columns) >= 16
                    assert form == "many" or found.rows == FEW


def test_bytes_of_shared_memory_by_hand() -> None:
    """Two stages of 16 x 64 numbers of x in bf16, and of 32 x 64 weights of gate and up."""
    how = Launch(16, 32, 64, 4, 2)
    assert shared_bytes(how, "front", 16, 16) == 2 * (2 * 16 * 64 + 2 * 2 * 32 * 64)
    # of int8, weights are half as much, and bf16 beside that when they are multiplied
    assert shared_bytes(how, "front", 8, 16) == 2 * (2 * 16 * 64 + 2 * 32 * 64) + 2 * 2 * 32 * 64
    # hidden for a row is float32
    assert shared_bytes(Launch(1, 128, 32, 4, 3), "back", 16, 16) == 3 * (4 * 128 + 2 * 128 * 32)


def test_a_card_with_less_shared_memory_gets_fewer_stages() -> None:
    """Of 24 KiB each here: a 64 x 64 tile of x and two of weights, in bf16."""
    whole = launch("front", 16, 16, 64, 89, SHARED[89])
    assert whole.stages == 3 and shared_bytes(whole, "front", 16, 16) == 72 << 10
    assert launch("front", 16, 16, 64, 89, 64 << 10).stages == 2
    assert launch("front", 16, 16, 64, 89, 16 << 10).stages == 1


def test_an_unknown_card_is_taken_for_the_next_older_one() -> None:
    for arch, known in ((86, 80), (100, 90), (121, 90)):
        for rows in (1, 16, 17):
            asked = "back", 16, 16, rows
            assert launch(*asked, arch, 1 << 20) == launch(*asked, known, 1 << 20)
    with pytest.raises(DeviceError, match=r"7\.5: expected 8\.0"):
        launch("front", 16, 16, 1, 75, SHARED[80])
