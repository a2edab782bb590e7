"""The scores a model gives every token of its windows: its likelihood and its top prediction."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np

from crisp.adapter.calls import replaced_forward
from crisp.capture import cache_of
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.progress import Progress, no_progress
from crisp.quality.scores import Scores
from crisp.text_windows import TokenWindows

BATCH = 8
_LOGITS = 1 << 25  # logits computed at a time: 128 MiB in float32


def score_windows(
    model: Any,
    windows: TokenWindows,
    progress: Progress = no_progress,
    *,
    batch: int = BATCH,
    singly: bool = False,
) -> Scores:
    """Return the model's scores of all windows, which are fed in order.

    batch: windows fed side by side where they are equally long. singly: feed one token at a time,
    as in decoding, for what depends on the order of layers. progress: called with (tokens fed,
    tokens in all). Raises CrispError where a score is not finite.
    """
    torch = import_extra("torch")
    nll: list[Any] = []  # [scored tokens of a group] each
    top: list[Any] = []
    done = 0
    with torch.inference_mode():
        for group in _groups(windows, 1 if singly else batch):
            tokens = torch.from_numpy(np.stack([windows.tokens[i] for i in group]))
            tokens = tokens.to(model.device)  # [batch, positions]
            first = tokens.shape[1] - windows.scored[group[0]]  # the first token that is scored
            feed = _one_by_one if singly else _at_once
            parts = [
                _score(logits, tokens[:, at : at + logits.shape[1]])
                for at, logits in feed(model, tokens, first)
            ]
            nll.append(torch.cat([part[0] for part in parts], 1).reshape(-1).cpu())
            top.append(torch.cat([part[1] for part in parts], 1).reshape(-1).cpu())
            done += tokens.numel()
            progress(done, windows.n_fed)
    scores = Scores(
        nll=torch.cat(nll).float().numpy(),
        top=torch.cat(top).int().numpy(),
        window=np.repeat(np.arange(len(windows.scored), dtype=np.int32), windows.scored),
        text=np.repeat(np.array(windows.text, np.int32), windows.scored),
    )
    if not np.isfinite(scores.nll).all():
        where = windows.names[scores.text[np.argmin(np.isfinite(scores.nll))]]
        raise CrispError(f"{where}: the model gives a token no finite likelihood")
    return scores


def _groups(windows: TokenWindows, batch: int) -> Iterator[list[int]]:
    """Yield numbers of consecutive windows of equal length and equally many scored tokens."""
    lengths = map(len, windows.tokens)
    sizes = list(zip(lengths, windows.scored, strict=True))
    for _, run in groupby(range(len(sizes)), sizes.__getitem__):
        numbers = list(run)
        yield from (numbers[at : at + batch] for at in range(0, len(numbers), batch))


def _score(logits: Any, tokens: Any) -> tuple[Any, Any]:
    """Return (negative log likelihood of tokens, likeliest tokens), [batch, positions] each.

    logits [batch, positions, vocabulary] that predict ``tokens`` [batch, positions].
    """
    torch = import_extra("torch")
    logits = logits if logits.dtype == torch.float64 else logits.float()
    of_tokens = logits.gather(2, tokens[..., None])[..., 0]  # [batch, positions]
    return torch.logsumexp(logits, 2) - of_tokens, logits.argmax(2)


def _at_once(model: Any, tokens: Any, first: int) -> Iterator[tuple[int, Any]]:
    """Yield (position, logits that predict the tokens from there on) from ``first`` on.

    tokens [batch, positions]; logits [batch, some positions, vocabulary]. All logits of a large
    vocabulary would take gigabytes, so the model is called for a few positions at a time, again and
    again, while its decoder computes only once.
    """
    torch = import_extra("torch")
    last = tokens.shape[1]
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        yield first, model(input_ids=tokens, use_cache=False).logits[:, first - 1 : -1]
        return
    vocabulary = model.config.get_text_config().vocab_size
    step = max(1, _LOGITS // (tokens.shape[0] * vocabulary))  # positions at a time
    with _computed_once(model.base_model):
        for at in range(first, last, step):
            # The position before a token predicts it.
            before = torch.arange(at, min(at + step, last), device=tokens.device) - 1
            yield at, model(input_ids=tokens, use_cache=False, logits_to_keep=before).logits


@contextmanager
def _computed_once(decoder: Any) -> Iterator[None]:
    """Let ``decoder`` compute at its first call in the block and return the same output later."""
    forward = decoder.forward
    outputs: list[Any] = []

    def once(*args: Any, **kwargs: Any) -> Any:
        if not outputs:
            outputs.append(forward(*args, **kwargs))
        return outputs[0]

    with replaced_forward(decoder, once):
        yield


def _one_by_one(model: Any, tokens: Any, first: int) -> Iterator[tuple[int, Any]]:
    """Yield what `_at_once` yields, from a pass of its own for every token."""
    cache: dict[str, Any] = {}
    for at in range(tokens.shape[1]):
        output = model(input_ids=tokens[:, at : at + 1], use_cache=True, **cache)
        cache = cache_of(output, model)
        if first <= at + 1 < tokens.shape[1]:
            yield at + 1, output.logits
