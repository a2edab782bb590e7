"""Controls that change a model's experts: precision by expert (EdgeMoE), and dropped experts.

EdgeMoE (arXiv:2308.14352) stores rarely used experts in fewer bits, here as fake quantisation.
Dropped experts are removed for good; the router chooses among the rest. Either is done to a loaded
model for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.adapter.experts import Experts
from crisp.adapter.layout import expert_layout, intercept_experts
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.prepare.calibration import CalibrationSums

Floats = npt.NDArray[np.float64]
GROUP = 64  # weights that share a scale


@contextmanager
def quantized(model: Any, bits: Mapping[int, npt.NDArray[np.int64]]) -> Iterator[None]:
    """Round the experts' weights to ``bits[layer]`` [experts] bits each; restore them afterwards.

    Symmetric, to the nearest, one scale for each 64 weights of a row; 16 bits and more change
    nothing. Biases stay. Raises CrispError for fewer than 2 bits.
    """
    torch = import_extra("torch")
    saved = []
    try:
        with torch.no_grad():
            for layer in expert_layout(model).layers:
                experts = Experts.of(layer)
                for name, weight in experts.matrices():
                    saved.append((weight, weight.detach().clone()))
                    for expert, wide in enumerate(bits[layer.index].tolist()):
                        if wide < 2:
                            raise CrispError(f"{name}: {wide} bits; at least 2 were expected")
                        if wide < 16:
                            weight[expert] = fake_quantize(weight[expert], wide)
        yield
    finally:
        with torch.no_grad():
            for weight, original in saved:
                weight.copy_(original)


def fake_quantize(weight: Any, bits: int) -> Any:
    """Round a matrix [rows, columns] to ``bits`` bits, with a scale for each 64 of a row.

    >>> import torch
    >>> fake_quantize(torch.tensor([[0.3, -1.0, 0.9, 0.1]]), 2)
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
def dropped(model: Any, experts: Mapping[int, npt.NDArray[np.bool_]]) -> Iterator[None]:
    """Remove experts: where ``experts[layer]`` [experts] is true, the router cannot choose them.

    Their logits become minus infinity, so that the router ranks and weighs the rest. Raises
    CrispError where fewer than k experts are left, and, while the model runs, for a router that
    chooses a dropped one all the same.
    """
    torch = import_extra("torch")
    layout = expert_layout(model)
    masks: dict[int, Any] = {}
    for layer in layout.layers:
        gone = torch.from_numpy(experts[layer.index]).to(model.device)
        expert_parameters = {id(p) for p in layer.experts.parameters()}
        for parameter in layer.block.parameters():
            if (
                parameter.ndim == 2
                and len(parameter) == layout.n_experts
                and id(parameter) not in expert_parameters
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
        layer = layout.layers[which]
        gone = experts[layer.index]
        if len(gone) - gone.sum() < index.shape[1]:
            raise CrispError(f"{layer.name}: {index.shape[1]} experts a token, fewer are left")
        if gone[np.minimum(index.cpu().numpy(), len(gone) - 1)].any():
            raise CrispError(f"{layer.name}: its router is not understood; experts stay chosen")
        return run()

    with intercept_experts(layout, check), Restrict():
        yield


def bits_by_rank(worth: Mapping[int, Floats]) -> dict[int, npt.NDArray[np.int64]]:
    """Return EdgeMoE's bits by layer [experts]: 8 for the best quarter, 2 for the worst, else 4.

    worth [experts], larger is better.
    """
    bits = {}
    for layer, values in worth.items():
        n = len(values)
        place, quarter = np.empty(n, np.int64), n // 4
        place[np.argsort(-values, kind="stable")] = np.arange(n)
        bits[layer] = np.where(place < quarter, 8, np.where(place < n - quarter, 4, 2))
    return bits


def least(worth: Mapping[int, Floats], gone: int) -> dict[int, npt.NDArray[np.bool_]]:
    """Return, by layer, True at the ``gone`` experts of least worth: [experts]."""
    masks = {}
    for layer, values in worth.items():
        masks[layer] = np.zeros(len(values), bool)
        masks[layer][np.argsort(values, kind="stable")[:gone]] = True
    return masks


def activations(calibration: CalibrationSums) -> dict[int, Floats]:
    """Return, by layer, how many tokens each expert had: [experts]."""
    return {layer: sums.tokens.astype(np.float64) for layer, sums in calibration.layers.items()}


def saliency(calibration: CalibrationSums) -> dict[int, Floats]:
    """Return, by layer, the mean norm of each expert's weighted output in its combinations."""
    return {
        layer: sums.removed.sum(1) / np.maximum((sums.anchored + sums.anchored.T).sum(1), 1)
        for layer, sums in calibration.layers.items()
    }
