"""One event's arithmetic: which rows of the input each expert takes, how wide, how much they count.

The rows of an expert are ordered by falling width, so that those which use a block are a leading
run of them: no row is gathered twice, and no block is computed for a row that did not ask for it.
"""

from __future__ import annotations

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
        self.expert = expert
        self.hidden = hidden
        self.inputs: Any = None  # [r, d_model], gathered when the first block is computed
        self.sums: Any = None  # [r, d_model] float32: of the blocks computed so far, in their order
        if len(rows) == 1:
            self.rows, self.weights, self.counts = rows, weights, [1] * int(widths[0])
            return
        falling = np.argsort(-widths, kind="stable")
        self.rows, self.weights = rows[falling], weights[falling]
        rising = widths[falling[::-1]]
        past = rising.searchsorted(np.arange(rising[-1]), side="right")
        # counts[b]: how many of the rows use block b
        self.counts = (len(rows) - past).tolist()


def works(
    ids: npt.NDArray[Any],
    widths: npt.NDArray[Any],
    weights: npt.NDArray[np.float32],
    hidden: Any,
) -> dict[int, Work]:
    """The work of each of an event's experts that a row asks for, by expert.

    ids, widths (blocks) and weights: [rows, k]; hidden [rows, d_model], on the device.
    """
    row, rank = np.nonzero(widths > 0)
    own = ids[row, rank].argsort(kind="stable")
    row, rank = row[own], rank[own]
    owner, widths, weights = ids[row, rank], widths[row, rank], weights[row, rank]
    made, start = dict[int, Work](), 0
    for end in (np.flatnonzero(np.diff(owner, append=-1)) + 1).tolist():
        expert, part = int(owner[start]), slice(start, end)
        made[expert] = Work(expert, row[part], widths[part], weights[part], hidden)
        start = end
    return made
