"""Windows read by a model: how likely it finds every token, and what it would have said instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np

from crisp.capture import cache_of
from crisp.checkpoint.windows import Windows
from crisp.errors import CrispError
from crisp.extras import need
from crisp.quality.scores import Scores

BATCH = 8
_LOGITS = 1 << 25  # computed at a time: 128 MiB in float32


def measure(
    model: Any,
    windows: Windows,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    batch: int = BATCH,
    singly: bool = False,
) -> Scores:
    """The model's scores of all windows, which are fed in order.

    ``batch`` windows are fed side by side where they are equally long. singly: one token at a
    time, as in decoding, for what depends on the order of layers. ``progress`` is told (tokens fed,
    tokens in all). Raises CrispError where a score is not a number.
    """
    torch = need("torch")
    nll: list[Any] = []
    top: list[Any] = []
    done = 0
    with torch.inference_mode():
        for group in _groups(windows, 1 if singly else batch):
            tokens = torch.from_numpy(np.stack([windows.tokens[i] for i in group]))
            tokens = tokens.to(model.device)  # [batch, positions]
            first = tokens.shape[1] - windows.fresh[group[0]]  # the first token that is scored
            feed = _one_by_one if singly else _at_once
            parts = [
                _scored(logits, tokens[:, at : at + logits.shape[1]])
                for at, logits in feed(model, tokens, first)
            ]
            nll.append(torch.cat([part[0] for part in parts], 1).reshape(-1).cpu())
            top.append(torch.cat([part[1] for part in parts], 1).reshape(-1).cpu())
            done += tokens.numel()
            progress(done, windows.fed)
    scores = Scores(
        nll=torch.cat(nll).float().numpy(),
        top=torch.cat(top).int().numpy(),
        window=np.repeat(np.arange(len(windows.fresh), dtype=np.int32), windows.fresh),
        text=np.repeat(np.array(windows.text, np.int32), windows.fresh),
    )
    if not np.isfinite(scores.nll).all():
        where = windows.names[scores.text[np.argmin(np.isfinite(scores.nll))]]
        raise CrispError(f"{where}: the model gives a token no finite likelihood")
    return scores


def _groups(windows: Windows, batch: int) -> Iterator[list[int]]:
    """Consecutive windows that can be fed side by side: equally long, equally many scored."""
    sizes = [(len(own), fresh) for own, fresh in zip(windows.tokens, windows.fresh, strict=True)]
    for _, run in groupby(range(len(sizes)), sizes.__getitem__):
        alike = list(run)
        yield from (alike[at : at + batch] for at in range(0, len(alike), batch))


def _scored(logits: Any, tokens: Any) -> tuple[Any, Any]:
    """(negative log likelihood of tokens [batch, positions], the likeliest ones)."""
    torch = need("torch")
    logits = logits if logits.dtype == torch.float64 else logits.float()
    own = logits.gather(2, tokens[..., None])[..., 0]
    return torch.logsumexp(logits, 2) - own, logits.argmax(2)


def _at_once(model: Any, tokens: Any, first: int) -> Iterator[tuple[int, Any]]:
    """(place, logits for the tokens from there on) of one pass over tokens, from ``first`` on.

    All logits of a large vocabulary would take gigabytes. So the model is asked for a few positions
    at a time, again and again, and its decoder computes only once.
    """
    torch = need("torch")
    last = tokens.shape[1]
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        yield first, model(input_ids=tokens, use_cache=False).logits[:, first - 1 : -1]
        return
    each = max(1, _LOGITS // (tokens.shape[0] * model.config.vocab_size))
    with _computing_once(model.base_model):
        for at in range(first, last, each):
            # What stands before a token predicts it.
            before = torch.arange(at, min(at + each, last), device=tokens.device) - 1
            yield at, model(input_ids=tokens, use_cache=False, logits_to_keep=before).logits


@contextmanager
def _computing_once(decoder: Any) -> Iterator[None]:
    """Inside, ``decoder`` computes at its first call and gives the same output at every other."""
    forward, own = decoder.forward, decoder.__dict__.get("forward")
    kept: list[Any] = []

    def once(*args: Any, **kwargs: Any) -> Any:
        if not kept:
            kept.append(forward(*args, **kwargs))
        return kept[0]

    decoder.forward = once
    try:
        yield
    finally:
        del decoder.forward
        if own is not None:
            decoder.forward = own


def _one_by_one(model: Any, tokens: Any, first: int) -> Iterator[tuple[int, Any]]:
    """As `_at_once`, from one pass for every token."""
    cache: dict[str, Any] = {}
    for at in range(tokens.shape[1]):
        output = model(input_ids=tokens[:, at : at + 1], use_cache=True, **cache)
        cache = cache_of(output, model)
        if first <= at + 1 < tokens.shape[1]:
            yield at + 1, output.logits
