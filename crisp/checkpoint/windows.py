"""Texts cut into windows of tokens, as a model reads them for calibration and for perplexity."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError

LONGEST = 2048  # tokens of a window, unless asked otherwise


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows in the order of the texts. The last ``fresh`` tokens of a window are scored.

    ``tokens``: int64, at least 2 and at most ``window`` each, with what the tokenizer puts before a
    text in front; ``text``: the number of the text a window is of; ``dataset``: of each text, its
    name and sha256. ``stride`` is what was used.
    """

    tokens: list[npt.NDArray[np.int64]]
    fresh: list[int]
    text: list[int]
    dataset: list[str]
    window: int
    stride: int

    @property
    def names(self) -> list[str]:
        """Of the texts' files."""
        return [text.rpartition(" ")[0] for text in self.dataset]

    @property
    def n_tokens(self) -> int:
        """Scored tokens."""
        return sum(self.fresh)

    @property
    def fed(self) -> int:
        """Tokens that are read, counted in every window they are in."""
        return sum(map(len, self.tokens))


def window_length(config: Any, asked: int | None) -> int:
    """Tokens of a window: as asked, else the context of the model with this config, 2,048 at most.

    Raises CrispError for more than the context.
    """
    context = getattr(config, "max_position_embeddings", None)
    if asked is None:
        return min(context or LONGEST, LONGEST)
    if context is not None and asked > context:
        raise CrispError(f"--window {asked}: the model's context is {context}")
    return asked


def read_windows(
    tokenizer: Any,
    texts: Sequence[Path],
    window: int,
    stride: int | None = None,
    limit: int | None = None,
) -> Windows:
    """Windows of ``window`` tokens that start at every ``stride`` of each text.

    Each scores what the window before it did not hold: its last ``stride`` tokens, the first all
    but its own first token, which nothing predicts. A short window ends the text if it has a token
    left to score. Without overlap (stride None: the window) every window's first token is unscored.
    What the tokenizer puts before a text (a BOS) opens every window, is never scored, and predicts
    the first token; the stride is shortened where it would otherwise leave tokens out.

    limit: tokens in all, the same share of each text, from its start. Raises CrispError for a text
    that cannot be read or is shorter than a window.
    """
    stride = window if stride is None else stride
    led = opening(tokenizer)
    body = window - len(led)
    if body < (1 if led else 2):
        raise CrispError(f"--window {window}: expected {2 + max(0, len(led) - 1)} or more")
    if not 1 <= stride <= window:
        raise CrispError(f"--stride {stride}: expected 1 to the window's {window} tokens")
    if limit is not None and limit // len(texts) < body:
        raise CrispError(
            f"--tokens {limit}: {limit // len(texts)} for each of {len(texts)} texts; "
            f"at least a window of {window} was expected"
        )
    stride = min(stride, body)
    found = Windows([], [], [], [], window, stride)
    for number, path in enumerate(texts):
        text, digest = read_text(path)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < body:
            raise CrispError(f"{path}: {len(ids)} tokens, shorter than a window of {window}")
        ids = ids[: share(limit, len(texts), number)]
        for start, end, fresh in _cuts(len(ids), body, stride, bool(led)):
            found.tokens.append(np.array(led + ids[start:end], np.int64))
            found.fresh.append(fresh)
            found.text.append(number)
        found.dataset.append(f"{path.name} sha256:{digest}")
    return found


def check_vocabulary(windows: Windows, config: Any, where: str | Path) -> None:
    """Raise CrispError if a token is none of the model's: the tokenizer is another's."""
    size = config.get_text_config().vocab_size
    most = max(int(tokens.max()) for tokens in windows.tokens)
    if most >= size:
        raise CrispError(
            f"{where}: its tokenizer gives token {most}, but the model knows {size} tokens"
        )


def _cuts(length: int, window: int, stride: int, led: bool) -> Iterator[tuple[int, int, int]]:
    """(start, end, scored tokens at the end) of each window; led: something precedes its first."""
    seen = 0
    for start in range(0, length, stride):
        end = min(start + window, length)
        fresh = end - max(seen, start if led else start + 1)
        if fresh > 0:
            yield start, end, fresh
        seen = end
        if end == length:
            break


def opening(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts before a text, such as a BOS."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    return list(whole[: whole.index(plain[0])])


def share(total: int | None, parts: int, number: int) -> int | None:
    """Part ``number`` of ``total``, split evenly, the remainder to the first parts."""
    return None if total is None else total // parts + (number < total % parts)


def read_text(path: Path) -> tuple[str, str]:
    """A UTF-8 text and the sha256 of its bytes; CrispError names a file that is none."""
    try:
        data = path.read_bytes()
        return data.decode("utf-8"), hashlib.sha256(data).hexdigest()
    except OSError as error:
        raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CrispError(f"{path}: is not UTF-8 text (byte {error.start})") from error
