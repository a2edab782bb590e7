"""Halves become float32 exactly, with and without the processor's instruction for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

EVERY_HALF = """
import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from crisp.hw.devices.cpu.vectors import widen_half

@intrinsic
def widen(context, number):
    code = lambda context, builder, signature, args: widen_half(builder, args[0])
    return types.float32(number), code

@njit
def convert(bits, out):
    for i in range(len(bits)):
        out[i] = widen(bits[i])

bits = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
out = np.empty(len(bits), np.float32)
convert(bits, out)
np.testing.assert_array_equal(out, bits.view(np.float16).astype(np.float32))
zeros = out == 0
assert zeros.sum() == 2 and np.signbit(out[zeros]).sum() == 1
print("exact")
"""


@pytest.mark.parametrize("processor", [{}, {"NUMBA_CPU_NAME": "generic"}])
def test_every_half_is_widened_exactly(processor: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EVERY_HALF],
        env=os.environ | processor, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("exact\n", 0), done.stderr
