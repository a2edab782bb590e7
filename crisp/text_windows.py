"""Texts cut into windows of tokens, as calibration and perplexity read them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError

MAX_WINDOW = 2048  # tokens of a window, unless another length is requested


@dataclass(frozen=True, eq=False)
class TokenWindows:
    """Windows of token ids, in the order of their texts.

    A window begins with what the tokenizer puts before a text (a BOS). Of each window only the last
    tokens are scored: those that no window before it has scored.
    """

    tokens: list[npt.NDArray[np.int64]]  # of each window [length], 2 <= length <= window
    scored: list[int]  # of each window: how many of its last tokens are scored
    text: list[int]  # of each window: the number of its text
    dataset: list[str]  # of each text: file name and sha256
    window: int  # tokens, at most
    stride: int  # tokens from the start of one window to the next, as used

    @property
    def names(self) -> list[str]:
        """The file name of each text."""
        return [text.rpartition(" ")[0] for text in self.dataset]

    @property
    def n_scored(self) -> int:
        """Number of scored tokens."""
        return sum(self.scored)

    @property
    def n_fed(self) -> int:
        """Number of tokens a model reads: each is counted in every window it is in."""
        return sum(map(len, self.tokens))


def window_length(config: Any, requested: int | None) -> int:
    """Return the tokens of a window: as requested, else the model's context, 2,048 at most.

    Raises CrispError if more is requested than the context that ``config`` gives.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if requested is None:
        return min(context or MAX_WINDOW, MAX_WINDOW)
    if context is not None and requested > context:
        raise CrispError(f"--window {requested}: the model's context is {context}")
    return requested


def read_windows(
    tokenizer: Any,
    texts: Sequence[Path],
    window: int,
    stride: int | None = None,
    limit: int | None = None,
) -> TokenWindows:
    """Cut each text into windows of ``window`` tokens that start ``stride`` tokens apart.

    A window scores the tokens that the window before it did not hold: its last ``stride`` tokens.
    The first window scores all but its first token, which nothing predicts. A shorter window ends
    the text if it has a token left to score. Without overlap (stride None: the window) no window
    scores its first token. What the tokenizer puts before a text (a BOS) opens every window, is
    never scored, and predicts the first token; the stride is shortened where it would otherwise
    leave tokens out.

    limit: tokens of all texts together, an even share from the start of each; None: all. Raises
    CrispError for a text that cannot be read or is shorter than a window.
    """
    stride = window if stride is None else stride
    opening = opening_ids(tokenizer)
    body = window - len(opening)  # tokens of the text in a window
    if body < (1 if opening else 2):
        raise CrispError(f"--window {window}: expected {2 + max(0, len(opening) - 1)} or more")
    if not 1 <= stride <= window:
        raise CrispError(f"--stride {stride}: expected 1 to the window's {window} tokens")
    if limit is not None and limit // len(texts) < body:
        raise CrispError(
            f"--tokens {limit}: {limit // len(texts)} for each of {len(texts)} texts; "
            f"at least a window of {window} was expected"
        )
    stride = min(stride, body)
    windows = TokenWindows([], [], [], [], window, stride)
    for number, path in enumerate(texts):
        text, digest = read_text(path)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < body:
            raise CrispError(f"{path}: {len(ids)} tokens, shorter than a window of {window}")
        ids = ids[: even_share(limit, len(texts), number)]
        for start, end, scored in _window_bounds(len(ids), body, stride, bool(opening)):
            windows.tokens.append(np.array(opening + ids[start:end], np.int64))
            windows.scored.append(scored)
            windows.text.append(number)
        windows.dataset.append(f"{path.name} sha256:{digest}")
    return windows


def check_vocabulary(windows: TokenWindows, config: Any, where: str | Path) -> None:
    """Raise CrispError if a token id exceeds the vocabulary: the tokenizer is another model's."""
    check_tokens(max(int(tokens.max()) for tokens in windows.tokens), config, where)


def check_tokens(largest: int, config: Any, where: str | Path) -> None:
    """Raise CrispError if ``largest``, of all token ids, exceeds the vocabulary."""
    size = config.get_text_config().vocab_size
    if largest >= size:
        raise CrispError(
            f"{where}: its tokenizer gives token {largest}, but the model knows {size} tokens"
        )


def _window_bounds(
    length: int, window: int, stride: int, has_opening: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, tokens scored at the end) of each window of a text of ``length`` tokens.

    has_opening: whether something precedes, and so predicts, a window's first token.
    """
    scored_end = 0
    for start in range(0, length, stride):
        end = min(start + window, length)
        scored = end - max(scored_end, start if has_opening else start + 1)
        if scored > 0:
            yield start, end, scored
        scored_end = end
        if end == length:
            break


def opening_ids(tokenizer: Any) -> list[int]:
    """Return the token ids that the tokenizer puts before a text, such as a BOS.

    Raises CrispError for a tokenizer that makes no token of a letter.
    """
    without = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    if not without or without[0] not in whole:
        raise CrispError("its tokenizer makes no token of the letter a; one of text was expected")
    return list(whole[: whole.index(without[0])])


def even_share(total: int | None, parts: int, number: int) -> int | None:
    """Return part ``number`` of ``total`` split evenly, the remainder going to the first parts.

    >>> [even_share(8, 3, part) for part in range(3)]
    [3, 3, 2]
    """
    return None if total is None else total // parts + (number < total % parts)


def check_texts(paths: Iterable[Path]) -> None:
    """Raise CrispError for a path that is no text; pipes such as /dev/stdin may be one."""
    for path in paths:
        if path.is_dir():
            raise CrispError(f"{path}: is a folder; a text was expected")
        if not path.exists():
            raise CrispError(f"{path}: no such file; a text was expected")
        if path.is_char_device() and not path.samefile("/dev/stdin"):  # some never end
            raise CrispError(f"{path}: is a device; a text was expected")


def read_text(path: Path) -> tuple[str, str]:
    """Return a UTF-8 text and the sha256 of its bytes; CrispError names a file that is none."""
    try:
        data = path.read_bytes()
        return data.decode("utf-8"), hashlib.sha256(data).hexdigest()
    except OSError as error:
        raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CrispError(f"{path}: is not UTF-8 text (byte {error.start})") from error
