"""Every form of the kernels, with what a launch on a card would tell Triton's compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crisp.hw.devices.gpu.kernels import blocks
from crisp.hw.devices.gpu.kernels.calls import constants
from crisp.hw.devices.gpu.kernels.launch import FEW, SHARED, launch
from crisp.hw.devices.gpu.kernels.layout import BITS, BlockLayout

_SHAPES = {"silu": (4096, 1792), "gelu": (4096, 1792), "gpt_oss": (2880, 368)}
"""d_model and block, by activation: those of Mixtral 8x7B, and of gpt-oss-20b with biases."""

_OPERANDS = {"fp32": ("fp32",), "fp16": ("fp16",), "bf16": ("bf16",)} | dict.fromkeys(
    ("int8", "int4"), ("fp16", "bf16")
)
"""The types of x by the store's dtype: models run in the type that they are published in."""

_ROWS = {"row": 1, "few": FEW, "many": FEW + 1}
_TABLES = {"slots": "*i32", "counts": "*i32", "neurons": "*i32", "blocks": "i32", "rows": "i32"}


@dataclass(frozen=True)
class Form:
    """A kernel, and what Triton's compiler has to know of its arguments."""

    name: str
    fn: Any  # the @triton.jit function
    signature: dict[str, str]  # every argument by name: its type, or constexpr
    constexprs: dict[str, Any]
    aligned: tuple[str, ...]  # arguments that are multiples of 16, as a launch would find
    num_warps: int
    num_stages: int
    mma: bool  # whether it has to use tensor cores


def forms(arch: int) -> list[Form]:
    """Return all forms for an architecture (10 * major + minor; a key of SHARED)."""
    return [
        _form(arch, kernel, form, dtype, x, activation)
        for dtype, kinds in _OPERANDS.items()
        for x in kinds
        for form in _ROWS
        for kernel, activations in (("front", tuple(_SHAPES)), ("back", ("silu",)))
        for activation in activations
    ]


def _form(arch: int, kernel: str, form: str, dtype: str, x: str, activation: str) -> Form:
    d_model, block = _SHAPES[activation]
    biases = activation == "gpt_oss"
    stride = 4 * block * d_model * 4  # any multiple of 4096: more than any dtype takes
    layout = BlockLayout(d_model, block, stride, dtype, activation, biases)
    how = launch(kernel, layout.bits, BITS[x], _ROWS[form], arch, SHARED[arch])
    constexprs = constants(layout, kernel, how)
    fn = getattr(blocks, f"{kernel}_{'row' if how.rows == 1 else 'rows'}")
    pointers = {
        "numbers": "*i8" if layout.quantized else f"*{dtype}",
        "halves": "*fp16" if layout.quantized else f"*{dtype}",
        "x": f"*{x}",
        "hidden": "*fp32" if how.rows == 1 else f"*{x}",
        "sums": "*fp32",
    }
    types = pointers | _TABLES | dict.fromkeys(constexprs, "constexpr")
    return Form(
        name="-".join(
            (kernel, form, dtype, x, activation) if kernel == "front" else (kernel, form, dtype, x)
        ),
        fn=fn,
        signature={name: types[name] for name in fn.arg_names},
        constexprs=constexprs,
        aligned=tuple(name for name in fn.arg_names if name in pointers),
        num_warps=how.warps,
        num_stages=how.stages,
        mma=how.rows > 1 and BITS[x] == 16,
    )
