"""What a reader of figures must know beside them, or would read too much into them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from crisp.model.spec import BUILTIN

KIND = ("model.name", "model.n_layers", "trace.model", "policy.width")  # the fields of a `Kind`
_MOST = 3  # lines of one sort


class Kind(NamedTuple):
    """What is looked at of a run; None: the run has no such setting."""

    model: str | None
    layers: str | None
    traced: str | None  # the model that the routing is of
    width: str | None


def caveats(kinds: Iterable[Kind]) -> list[str]:
    """A line each; those of several models at most three times.

    >>> caveats([Kind("mixtral-8x7b", "6", "mixtral-8x7b", "full")])
    ['6 of 32 layers of mixtral-8x7b: tokens/s are of these layers']
    """
    layers: dict[str, None] = {}
    routing: dict[str, None] = {}
    narrow = False
    for kind in dict.fromkeys(kinds):
        whole = BUILTIN.get(kind.model or "")
        if whole is not None and kind.layers in [str(n) for n in range(whole.n_layers)]:
            layers[f"{kind.layers} of {whole.n_layers} layers of {kind.model}: tokens/s are of "
                   "these layers"] = None  # fmt: skip
        if None not in (kind.model, kind.traced) and kind.model != kind.traced:
            routing[f"the routing is {kind.traced}'s, the sizes are {kind.model}'s"] = None
        narrow |= kind.width not in (None, "full")
    lines = [*list(layers)[:_MOST], *list(routing)[:_MOST]]
    more = len(layers) + len(routing) - len(lines)
    if more:
        lines.append(f"and {more} more like these, of other models")
    if narrow:
        lines.append(
            "speed alone does not rank policies: widths cost quality, which is not simulated"
        )
    return lines
