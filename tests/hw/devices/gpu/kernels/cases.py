"""Pieces to compute: pools of blocks, what they must give in double precision, and how exactly.

The bytes of a slot are put together here from what docs/store.md says, not by the code under test.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from crisp.hw.devices.gpu.kernels.layout import BlockLayout

NAN = 0xFF  # of every byte: no number in any float format, scales included
U32 = 2.0**-24  # the relative error of one rounding to float32, and of one to a half
HALVES = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 0.0}
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    dtype: str  # of the store
    x: str
    d: int
    block: int
    neurons: tuple[int, ...]  # of each block of the piece
    counts: tuple[int, ...]  # the rows that use it
    rows: int  # of x
    activation: str = "silu"
    matrices: int = 3

    def __str__(self) -> str:
        blocks = "+".join(f"{n}x{c}" for n, c in zip(self.neurons, self.counts, strict=True))
        return (
            f"{self.dtype}-{self.x}-d{self.d}-b{self.block}-{blocks}of{self.rows}-{self.activation}"
            f"-{self.matrices}"
        )

    @property
    def layout(self) -> BlockLayout:
        bits = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4}[self.dtype]
        n, biases = self.matrices, self.activation.startswith("gpt_oss")
        size = n * self.block * self.d * bits // 8
        if bits < 16:
            size += n * self.block * self.d // 64 * 2
        if biases:
            size += (n - 1) * self.block * max(bits, 16) // 8
        stride = 4096 * math.ceil(size / 4096)
        return BlockLayout(self.d, self.block, stride, self.dtype, self.activation, biases, n)


@dataclass
class BlockRange:
    """What add_blocks is given, and what it must make of it."""

    case: Case
    pool: torch.Tensor
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    x: torch.Tensor
    before: torch.Tensor  # sums
    truth: torch.Tensor  # float64
    bound: torch.Tensor  # of the error, each number's own


def piece(case: Case) -> BlockRange:
    """Random weights in scattered slots; whatever must not matter is NaN."""
    torch.manual_seed(5)
    n, layout = len(case.neurons), case.layout
    pool = torch.full((2 * n + 1, layout.stride), NAN, dtype=torch.uint8)
    slots = torch.randperm(len(pool), dtype=torch.int32)[:n]
    x = torch.full((case.rows, case.d), math.nan, dtype=TYPES[case.x])
    x[: case.counts[0]] = torch.randn(case.counts[0], case.d).to(x.dtype)
    before = torch.full((case.rows, case.d), math.nan)
    before[: case.counts[0]] = torch.randn(case.counts[0], case.d)
    truth, bound = before.double(), torch.zeros(case.rows, case.d).double()
    for slot, count, width in zip(slots.tolist(), case.counts, case.neurons, strict=True):
        matrices, biases = _fill(pool[slot], layout, width)
        partial, error = _expected(case, x[:count].double(), matrices, biases)
        truth[:count] += partial
        bound[:count] += error + U32 * truth[:count].abs()
    table = slots, torch.tensor(case.counts).int(), torch.tensor(case.neurons).int()
    return BlockRange(case, pool, table, x, before, truth, bound)


def check(given: BlockRange, add: Callable[..., None]) -> torch.Tensor:
    """The sums that ``add`` makes of a piece, which must be right; nothing else may change.

    Room between the kernels is NaN before. Whoever reads or writes behind anything, by a page at
    most, ends the process.
    """
    case, used = given.case, given.case.counts[0]
    room = torch.full((len(case.neurons) * case.rows * -(-case.block // 16) * 16,), math.nan)
    tensors = given.pool, *given.table, given.x, given.before, room
    pool, slots, counts, neurons, x, sums, hidden = map(_before_a_wall, tensors)
    add(case.layout, pool, slots, counts, neurons, x, sums, hidden)
    error = (sums[:used].double() - given.truth[:used]).abs()
    assert (error <= given.bound[:used]).all(), f"off by {(error - given.bound[:used]).max()}"
    assert sums[used:].isnan().all()
    assert torch.equal(pool, given.pool) and torch.equal(x[:used], given.x[:used])
    return sums[:used].clone()


def _before_a_wall(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that ends where a page ends, behind which nobody may touch anything."""
    size = tensor.numel() * tensor.itemsize
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    wall = ctypes.addressof(ctypes.c_char.from_buffer(memory, pages))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(wall), mmap.PAGESIZE, 0) == 0
    flat = torch.frombuffer(memory, dtype=tensor.dtype, offset=pages - size, count=tensor.numel())
    return flat.view(tensor.shape).copy_(tensor)


def _fill(slot: torch.Tensor, layout: BlockLayout, width: int) -> tuple[list[Any], list[Any]]:
    """Random weights of the leading neurons, written to a slot; float64 copies of them."""
    d, block, parts = layout.d_model, layout.block, layout.matrices
    if layout.dtype in TYPES:
        kind = TYPES[layout.dtype]
        numbers = slot.view(kind)
        matrices = []
        for which in range(parts):
            own = numbers[which * block * d :][: width * d]
            own.copy_(torch.randn(width * d) * (4 / math.sqrt(d)))
            matrices.append(own.double().view(width, d))
    else:
        kind = torch.float16
        most, each = (127, 1) if layout.dtype == "int8" else (7, 2)
        matrices, size = [], block * d // each
        begin = parts * size + (2 * (parts - 1) * block if layout.biases else 0)
        scales = slot[begin : begin + 2 * parts * block * d // 64].view(kind)
        scales = scales.view(parts, block, d // 64)
        for which in range(parts):
            q = torch.randint(-most - (each == 2), most + 1, (width, d))
            s = ((torch.rand(width, d // 64) - 0.5) * 24 / (most * math.sqrt(d))).half()
            packed = q if each == 1 else (q[:, 0::2] & 15) | (q[:, 1::2] & 15) << 4
            slot[which * size :][: width * d // each] = (packed & 255).to(torch.uint8).flatten()
            scales[which, :width] = s
            matrices.append(q.double() * s.double().repeat_interleave(64, 1))
        numbers = slot[parts * size : parts * size + 2 * (parts - 1) * block].view(kind)
    if not layout.biases:
        return matrices, []
    begin = parts * block * d if layout.dtype in TYPES else 0
    biases = []
    for which in range(parts - 1):
        own = numbers[begin + which * block :][:width]
        own.copy_(torch.randn(width))
        biases.append(own.double())
    return matrices, biases


def _expected(case: Case, x: Any, matrices: list[Any], biases: list[Any]) -> tuple[Any, Any]:
    """One block's partial sum in float64, and what may be wrong with it in a kernel.

    A sum of k products in float32 is off by at most k + 1 roundings of the sum of their sizes, in
    whatever order. Products of halves are exact in float32, as are those of a whole number and its
    scale. For many rows hidden is rounded to what tensor cores multiply, and so are weights that
    were quantised; in fp16 also by up to 2^-25 where numbers are tiny. No activation is steeper
    than 1.13, and exp, erf and what is done with them take 16 roundings; that of exp's argument
    counts as often as the argument is large. Errors of errors get a hundredth.
    """
    *gates, up, down = matrices
    gate = gates[0] if gates else up
    operand = TYPES[case.x] if case.dtype not in TYPES or case.x == case.dtype else torch.float32
    kept = HALVES[operand] if case.rows > 1 else 0.0
    least = 2.0**-25 if kept and operand == torch.float16 else 0.0
    dequantised, fine = (kept, least) if case.dtype not in TYPES else (0.0, 0.0)

    g, u = x @ gate.T, x @ up.T
    sizes = x.abs()
    g_error, u_error = (
        ((case.d + 2) * U32 + dequantised) * (sizes @ w.abs().T) + fine * sizes.sum(1, keepdim=True)
        for w in (gate, up)
    )
    if biases:
        g, u = g + biases[0], u + biases[-1]
        g_error, u_error = g_error + U32 * g.abs(), u_error + U32 * u.abs()
    steepness, a, m = _activated(case.activation, g, u)
    if not gates:
        m, u_error = torch.ones_like(a), torch.zeros_like(a)
    h = a * m
    h_error = steepness * g_error * m.abs() + a.abs() * u_error + least
    h_error += (kept + (16 + 2 * g.abs()) * U32) * h.abs() + 2 * U32 * (g * m).abs()
    error = h_error @ down.abs() + fine * h.abs().sum(1, keepdim=True)
    error += ((len(down) + 2) * U32 + dequantised) * (h.abs() @ down.abs())
    return h @ down, 1.01 * error


def _activated(name: str, g: Any, u: Any) -> tuple[Any, Any, Any]:
    """(how steep the activation of the gate is at most, that activation, what it multiplies)."""
    functional = torch.nn.functional
    kind, _, rest = name.rstrip(")").partition("(")
    first, *more = (float(number) for number in (rest or "1.702,7").split(","))
    if kind == "gpt_oss":
        g, m = g.clamp(max=more[0]), u.clamp(-more[0], more[0]) + 1
        return 1.13 if first > 1 else 1.0, g * torch.sigmoid(first * g), m
    if kind == "clamped_silu":
        return 1.13, functional.silu(g.clamp(max=first)), u.clamp(-first, first)
    if kind == "silu_clamped":
        return 1.13, functional.silu(g).clamp(max=first), u.clamp(-first, first)
    if kind == "softcapped_silu":
        capped = first * torch.tanh(g / first) * torch.sigmoid(g)
        return 1.13, capped, more[0] * torch.tanh(u / more[0])
    plain = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
        "relu2": lambda x: torch.relu(x) ** 2,
    }
    # a square is as steep as its argument is large
    steepness = 2.02 * g.abs() + 1e-6 if kind == "relu2" else 1.13
    return steepness, plain[kind](g), u
