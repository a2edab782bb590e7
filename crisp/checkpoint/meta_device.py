"""Tensors on torch's meta device, which have a shape and a type, and no memory.

torch computes with them in Python, and imports its compiler and sympy for that: seconds, and 60 MB.
Hardly anything is computed with a model that has no weights, so that is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from crisp.extras import import_extra

_DRAWING = {
    "normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_",
    "xavier_normal_", "xavier_uniform_",
}  # fmt: skip
"""Names of torch's and transformers' functions that fill a tensor with random numbers."""


def on_meta_device(make: Callable[[], Any]) -> Any:
    """Return the model that ``make`` returns, made on the meta device; weights are not drawn."""
    torch = import_extra("torch")
    try:
        with torch.device("meta"), shapes_only():
            model = make()
    except RuntimeError:  # it computes with ranges and meta tensors together
        with torch.device("meta"):
            return make()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return model


def shapes_only() -> AbstractContextManager[None]:
    """Return a context in which little is computed for meta tensors.

    Nothing is drawn at random for them; stacking and concatenating finds their shape; ranges are
    made in memory, so that what follows from them is there, too.
    """
    torch = import_extra("torch")
    joining = {torch.stack: _stacked, torch.cat: _concatenated}

    class ShapesOnly(import_extra("torch.overrides").TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if getattr(function, "__name__", None) in _DRAWING:
                tensor = args[0] if args else kwargs["tensor"]
                if tensor.is_meta:
                    return tensor
            if function in joining and len(args[0]) and all(x.is_meta for x in args[0]):
                shape = joining[function]([x.shape for x in args[0]], *args[1:], **kwargs)
                if shape is not None:
                    return args[0][0].new_empty(shape)
            if function is torch.arange:
                kwargs = {"device": "cpu"} | kwargs
            return function(*args, **kwargs)

    mode: AbstractContextManager[None] = ShapesOnly()
    return mode


def _stacked(shapes: Sequence[Sequence[int]], dim: int = 0) -> list[int] | None:
    """Return the shape of stacked tensors; None: they cannot be stacked so, which torch says."""
    first, *others = map(list, shapes)
    if any(shape != first for shape in others) or not -len(first) - 1 <= dim <= len(first):
        return None
    first.insert(dim % (len(first) + 1), len(shapes))
    return first


def _concatenated(shapes: Sequence[Sequence[int]], dim: int = 0) -> list[int] | None:
    """Return the shape of concatenated tensors; None: they cannot be, which torch says."""
    whole, *others = map(list, shapes)
    if not -len(whole) <= dim < len(whole):
        return None
    size = sum(shape[dim] for shape in shapes if len(shape) == len(whole))
    whole[dim] = 0
    for shape in others:
        if (
            len(shape) != len(whole)
            or shape[:dim] + shape[dim:][1:] != whole[:dim] + whole[dim:][1:]
        ):
            return None
    whole[dim] = size
    return whole
