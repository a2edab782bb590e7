"""The fit of int4's scales while a layer is packed, and the errors that it leaves."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from crisp.hw.store.dtypes import Array, convert_bits
from crisp.model.quantization import quantize, weighted_error

Moments = npt.NDArray[np.float32]


class ScaleFit:
    """Quantises rows of experts with fitted scales, and sums up the errors of each expert.

    An error is that of a row's product with inputs of these moments: root of the sum of squares,
    relative to the product itself. Of down rows every output counts the same.
    """

    def __init__(self, moments: Mapping[int, Moments]) -> None:
        """moments: [d_model] by MoE layer, of the experts' input."""
        self._moments = moments
        # by layer, for each expert: squares that are left, that nearest rounding leaves, of weights
        self._sums: dict[int, list[npt.NDArray[np.float64]]] = {}

    def begin(self, layer: int) -> None:
        """Begin an expert of a layer."""
        self._sums.setdefault(layer, []).append(np.zeros(3))

    def quantize(self, rows: Array, kind: str, layer: int, down: bool) -> tuple[Array, Array]:
        """Return (q, scales) of rows [..., d_model] of the expert that was begun last.

        rows: finite, of type ``kind``; down: whether they are of the down matrix.
        """
        numbers = convert_bits(rows, kind, "F32").view(np.float32)
        moments = np.ones(rows.shape[-1], np.float32) if down else self._moments[layer]
        q, scales = quantize(numbers, "int4", moments)
        if np.isfinite(scales).all():
            left, whole = weighted_error(numbers, q, scales, moments)
            nearest, _ = weighted_error(numbers, *quantize(numbers, "int4"), moments)
            self._sums[layer][-1] += (left, nearest, whole)
        return q, scales

    def errors(self) -> dict[str, list[list[float]]]:
        """Return the relative error of each expert by MoE layer: as fitted, as only rounded."""
        result: dict[str, list[list[float]]] = {"fitted": [], "nearest": []}
        for sums in self._sums.values():
            whole = [max(float(one[2]), 1e-300) for one in sums]
            for i, name in enumerate(result):
                roots = [
                    (float(one[i]) / all_) ** 0.5 for one, all_ in zip(sums, whole, strict=True)
                ]
                result[name].append([float(f"{root:.4g}") for root in roots])
        return result
