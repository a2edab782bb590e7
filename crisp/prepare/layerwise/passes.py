"""Windows of text that pass one decoder layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.checkpoint.skeleton import Skeleton
from crisp.extras import import_extra
from crisp.prepare.calibration import Ints, batch_windows


def batches(
    tokens: Sequence[Ints], before: NDArray[np.float32] | None, starts: Sequence[int] | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yield token ids [windows, length] and hidden states [windows, length, d], batch by batch.

    before: hidden states of all windows, [tokens, d]; where there are none, they are None. starts:
    where each window's states begin; None: one window after the other.
    """
    torch, number = import_extra("torch"), 0
    if starts is None:
        starts = np.cumsum([0, *map(len, tokens)]).tolist()
    for batch in batch_windows(tokens):
        ids, hidden = torch.from_numpy(np.stack(batch)), None
        if before is not None:
            begins = starts[number : number + len(batch)]
            hidden = torch.from_numpy(np.stack([before[x : x + ids.shape[1]] for x in begins]))
        number += len(batch)
        yield ids, hidden


def run_windows(
    skeleton: Skeleton,
    index: int,
    tokens: Sequence[Ints],
    before: NDArray[np.float32] | None,
    starts: Sequence[int] | None = None,
) -> Iterator[NDArray[np.float32]]:
    """Run windows through decoder layer ``index``, which is loaded; yield its outputs [n, d].

    The other arguments are those of `batches`; the first layer has no input.
    """
    for ids, hidden in batches(tokens, before, starts):
        yield skeleton.run_layer(index, ids, hidden).flatten(0, 1).contiguous().numpy()
