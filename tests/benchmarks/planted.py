"""Small kernels that have one fault each, and two that have none."""

from __future__ import annotations

import triton
import triton.language as tl

from benchmarks.kernels.forms import Form


@triton.jit
def scaled(numbers, out, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(numbers + at, at < n) * 2, at < n)


@triton.jit
def held(numbers, out, n, SIZE: tl.constexpr):
    """All sums at once, which are more than a thread has registers."""
    at = tl.arange(0, SIZE)
    sums = tl.load(numbers + at)
    for i in range(n):
        sums = sums * i + sums
    tl.store(out + at, sums)


@triton.jit
def product(x, numbers, out, d, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
            HOW: tl.constexpr, SUMS: tl.constexpr):  # fmt: skip
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    sums = tl.zeros((M, N), SUMS)
    for first in range(0, d, K):
        left = tl.load(x + rows[:, None] * d + first + inner[None, :])
        right = tl.load(numbers + columns[None, :] * d + first + inner[:, None])
        sums = tl.dot(left, right, sums, input_precision=HOW, out_dtype=SUMS)
    tl.store(out + rows[:, None] * N + columns[None, :], sums)


def _elementwise(name: str, fn: object, size: int, *, aligned: tuple[str, ...] = ("numbers", "out"),
                 warps: int = 4, mma: bool = False) -> Form:  # fmt: skip
    signature = {"numbers": "*fp32", "out": "*fp32", "n": "i32"}
    return Form(name, fn, signature, {"SIZE": size}, (*aligned, "n"), warps, 3, mma)


def _product(name: str, dtype: str, sums: object, *, how: str = "ieee", size: int = 64,
             stages: int = 3, aligned: tuple[str, ...] = ("x", "numbers")) -> Form:  # fmt: skip
    signature = {"x": f"*{dtype}", "numbers": f"*{dtype}", "out": "*fp32", "d": "i32"}
    constexprs = {"M": 64, "K": size, "N": size, "HOW": how, "SUMS": sums}
    return Form(name, product, signature, constexprs, (*aligned, "out", "d"), 8, stages, True)


FORMS = [
    _elementwise("nothing", scaled, 1024),
    _product("nothing of a product", "bf16", tl.float32),
    _elementwise("registers", held, 8192, warps=1),
    _product("shared memory", "fp16", tl.float32, size=128, stages=5),
    _elementwise("narrow", scaled, 1024, aligned=("out",)),
    _product("narrow beside wide", "bf16", tl.float32, aligned=("x",)),
    _elementwise("no product", scaled, 1024, mma=True),
    _product("rounded", "fp32", tl.float32, how="tf32", size=32),
    _product("half sums", "fp16", tl.float16),
]
