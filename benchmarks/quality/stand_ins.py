"""What others do to a model's experts, done to a loaded model for a while, so as to compare.

Expert-wise precision (EdgeMoE, arXiv:2308.14352) as fake quantisation, and expert dropping: experts
removed for good, the router choosing among the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter.layout import expert_layout, intercept_experts
from crisp.adapter.experts import Experts
from crisp.errors import CrispError
from crisp.extras import import_extra

GROUP = 64  # weights that share a scale


@contextmanager
def quantised(model: Any, bits: Mapping[int, NDArray[np.int64]]) -> Iterator[None]:
    """Experts' weights rounded to ``bits[layer]`` [experts] bits each; afterwards as they were.

    Symmetric, to the nearest, one scale for each 64 weights of a row; 16 bits and more change
    nothing. Biases stay. Raises CrispError for fewer than 2 bits.
    """
    torch = import_extra("torch")
    saved = []
    try:
        with torch.no_grad():
            for layer in expert_layout(model).layers:
                own = Experts.of(layer)
                for name, weight in own.matrices():
                    saved.append((weight, weight.detach().clone()))
                    for expert, wide in enumerate(bits[layer.index].tolist()):
                        if wide < 2:
                            raise CrispError(f"{name}: {wide} bits; at least 2 were expected")
                        if wide < 16:
                            weight[expert] = fake_quantise(weight[expert], wide)
        yield
    finally:
        with torch.no_grad():
            for weight, original in saved:
                weight.copy_(original)


def fake_quantise(weight: Any, bits: int) -> Any:
    """A matrix [rows, columns] rounded to ``bits`` bits, a scale for each 64 of a row.

    >>> import torch
    >>> fake_quantise(torch.tensor([[0.3, -1.0, 0.9, 0.1]]), 2)
    tensor([[ 0., -1.,  1.,  0.]])
    """
    torch = import_extra("torch")
    columns = weight.shape[1]
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % GROUP))
    groups = padded.unflatten(1, (-1, GROUP))
    most = 2 ** (bits - 1) - 1
    scale = (groups.abs().amax(2, keepdim=True) / most).clamp_min(torch.finfo(torch.float32).tiny)
    rounded = (groups / scale).round().clamp(-most, most) * scale
    return (rounded.flatten(1)[:, :columns] + 0.0).to(weight.dtype)


@contextmanager
def dropped(model: Any, experts: Mapping[int, NDArray[np.bool_]]) -> Iterator[None]:
    """Remove experts: where ``experts[layer]`` [experts] is true, the router cannot choose them.

    Their logits become minus infinity, so that the router ranks and weighs the rest. Raises
    CrispError where fewer than k experts are left, and, while the model runs, for a router that
    chooses a dropped one all the same.
    """
    torch = import_extra("torch")
    found = expert_layout(model)
    masks: dict[int, Any] = {}
    for layer in found.layers:
        gone = torch.from_numpy(experts[layer.index]).to(model.device)
        own = {id(p) for p in layer.experts.parameters()}
        for parameter in layer.block.parameters():
            if (
                parameter.ndim == 2
                and len(parameter) == found.n_experts
                and id(parameter) not in own
            ):
                masks[id(parameter)] = gone

    class Restrict(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.nn.functional.linear and len(args) > 1:
                gone = masks.get(id(args[1]))
                if gone is not None:
                    return result.masked_fill(gone, float("-inf"))
            return result

    def check(which: int, hidden: Any, index: Any, weights: Any, run: Any) -> Any:
        layer = found.layers[which]
        gone = experts[layer.index]
        if len(gone) - gone.sum() < index.shape[1]:
            raise CrispError(f"{layer.name}: {index.shape[1]} experts a token, fewer are left")
        if gone[np.minimum(index.cpu().numpy(), len(gone) - 1)].any():
            raise CrispError(f"{layer.name}: its router is not understood; experts stay chosen")
        return run()

    with intercept_experts(found, check), Restrict():
        yield
