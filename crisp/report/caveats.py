"""Caveats: what a reader must know beside the figures to not misread them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from crisp.model.spec import BUILTIN

RUN_KIND_FIELDS = (
    "model.name",
    "model.n_layers",
    "trace.model",
    "policy.width",
)  # the settings in a `RunKind`
_MOST = 3  # lines of one sort


class RunKind(NamedTuple):
    """The settings of a run that caveats depend on; None: the run has no such setting."""

    model: str | None
    layers: str | None
    traced: str | None  # the model that the routing is of
    width: str | None


def caveats(kinds: Iterable[RunKind]) -> list[str]:
    """Return a line for each caveat; those of several models at most three times.

    >>> caveats([RunKind("mixtral-8x7b", "6", "mixtral-8x7b", "full")])
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
