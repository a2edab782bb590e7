"""A tokenizer learned from the text, and batches of token windows drawn from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from corpus import Text
from numpy.typing import NDArray

END = "<|endoftext|>"


def make_tokenizer(texts: list[Text], size: int) -> Any:
    """Train a byte-level BPE on the training text; its only special token ends a document."""
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learned.train_from_iterator((d for text in texts for d in sample(text.train)), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=learned, bos_token=END, eos_token=END, clean_up_tokenization_spaces=False
    )


def sample(documents: tuple[str, ...], limit: int = 1_500_000) -> Iterator[str]:
    """Return whole documents spread evenly over a text, of about ``limit`` characters.

    With a limit no kind of text dominates the vocabulary.
    """
    every = max(1, sum(map(len, documents)) // limit)
    return iter(documents[::every])


def encode(tokenizer: Any, documents: tuple[str, ...]) -> NDArray[np.int64]:
    """Return all documents as one row of token ids, int64 [n], an end of text after each."""
    backend = tokenizer.backend_tokenizer
    rows = [[*encoding.ids, tokenizer.eos_token_id] for encoding in backend.encode_batch(documents)]
    return np.concatenate([np.empty(0, np.int64), *(np.asarray(row, np.int64) for row in rows)])


def draw_batch(
    streams: list[NDArray[np.int64]], window: int, tokens: int, draw: np.random.Generator
) -> torch.Tensor:
    """Draw a batch of ``tokens`` tokens in windows: int64 [windows, window].

    Each window comes from one text, drawn with a probability proportional to the root of its length
    (a small text would otherwise hardly be seen).
    """
    weight = np.sqrt([len(stream) for stream in streams])
    rows = []
    for which in draw.choice(len(streams), tokens // window, p=weight / weight.sum()):
        start = draw.integers(0, len(streams[which]) - window + 1)
        rows.append(streams[which][start : start + window])
    return torch.from_numpy(np.stack(rows))
