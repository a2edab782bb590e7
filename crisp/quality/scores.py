"""What a model made of every scored token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Scores:
    """One entry a scored token, window after window, so that two runs can be laid side by side."""

    nll: npt.NDArray[np.float32]  # negative log likelihood of the token that stood there, in nats
    top: npt.NDArray[np.int32]  # the token that was given the highest probability
    window: npt.NDArray[np.int32]  # number of its window
    text: npt.NDArray[np.int32]  # number of its text
