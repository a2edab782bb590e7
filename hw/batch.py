"""One event's arithmetic: which rows of the input each expert takes, how wide, how much they count.

The rows of an expert are ordered by falling width, so that those which use a block are a leading
run of them: no row is gathered twice, and no block is computed for a row that did not ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class Work:
    """What one task computes. Tensors and sums are the device's affair."""

    __slots__ = ("counts", "expert", "hidden", "inputs", "rows", "sums", "weights")

    def __init__(
        self,
        expert: int,
        rows: npt.NDArray[np.int64],
        widths: npt.NDArray[np.int64],
        weights: npt.NDArray[np.float32],
        hidden: Any,
    ) -> None:
        """rows [r] of ``hidden`` [rows, d_model], their widths [r] in blocks and weights [r]."""
        falling = np.argsort(-widths, kind="stable")
        self.expert = expert
        self.rows = rows[falling]
        self.weights = weights[falling]
        sorted_widths = widths[falling]
        # counts[b]: how many of the rows use block b
        self.counts = [int((sorted_widths > b).sum()) for b in range(int(sorted_widths[0]))]
        self.hidden = hidden
        self.inputs: Any = None  # [r, d_model], gathered when the first block is computed
        self.sums: Any = None  # [r, d_model] float32: of the blocks computed so far, in their order


def works(
    experts: Sequence[int],
    ids: npt.NDArray[Any],
    widths: npt.NDArray[Any],
    weights: npt.NDArray[np.float32],
    hidden: Any,
) -> dict[int, Work]:
    """The work of each of an event's ``experts`` (those with a task).

    ids, widths (blocks) and weights: [rows, k]; hidden [rows, d_model], on the device.
    """
    asked = widths > 0
    made = {}
    for expert in experts:
        rows, rank = np.nonzero((ids == expert) & asked)
        made[expert] = Work(
            expert, rows, widths[rows, rank].astype(np.int64), weights[rows, rank], hidden
        )
    return made
