"""bfloat16 as it should be in Triton's interpreter, which keeps its bits in uint16.

By itself the interpreter multiplies those bits as whole numbers in ``dot`` and in arithmetic, and
cuts float32 off where hardware rounds to the nearest. Here ``dot`` widens them, casts round, and
other arithmetic is refused: a kernel has to widen numbers itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def mend() -> None:
    """From now on, in this process, in which Triton interprets."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot
    cast = InterpreterBuilder.cast_impl
    binary = InterpreterBuilder.binary_op

    def is_bf16(handle: Any) -> bool:
        return bool(handle.dtype.scalar == tl.bfloat16)

    def widened(handle: Any) -> Any:
        if not is_bf16(handle):
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
            return cast(self, source, kind)
        numbers = np.array(source.data, np.float32, ndmin=1)
        bits = torch.from_numpy(numbers).bfloat16().view(torch.uint16).numpy()
        return TensorHandle(bits.reshape(np.shape(source.data)), tl.bfloat16)

    def binary_op(self: Any, a: Any, b: Any, operation: Any) -> Any:
        if is_bf16(a) or is_bf16(b):
            raise TypeError("arithmetic with bfloat16: widen it first")
        return binary(self, a, b, operation)

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.binary_op = binary_op
