"""A model's score of every scored token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Scores:
    """Arrays with one entry per scored token, window after window: [tokens] each.

    Two runs over the same windows can be compared entry by entry.
    """

    nll: npt.NDArray[np.float32]  # negative log likelihood of the token in the text, in nats
    top: npt.NDArray[np.int32]  # the token that the model finds most probable
    window: npt.NDArray[np.int32]  # number of its window
    text: npt.NDArray[np.int32]  # number of its text

    def of_text(self, number: int) -> Scores:
        """Return the scores of the tokens of text ``number``."""
        in_text = self.text == number
        return Scores(*(np.asarray(values)[in_text] for values in vars(self).values()))
