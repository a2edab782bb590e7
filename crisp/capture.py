"""Capture of routing traces: a real model reads prompts and writes on, its routing is recorded.

Prompts are windows of equal length cut from the texts, so that a batch needs no padding. Every
sequence draws from its own generator, so what it writes does not depend on the batch it was in
(but for rounding: another batch may use another kernel). A row is one forward pass of one token:
the row of a generated token is the pass that has it as its *input*. The last token sampled, and
the one that ends a text, are never fed and have no row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter import (
    ExpertLayout,
    MagnitudePredictor,
    RecordedRouting,
    RoutingRecorder,
    record_routing,
)
from crisp.checkpoint.loading import LoadedModel, load_model
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.progress import Progress, counter, no_progress
from crisp.text_windows import check_tokens, even_share, opening_ids, read_text
from crisp.trace import DECODE, PREFILL, Header, RoutingTrace
from crisp.trace.check import half_weights

__all__ = ["Recipe", "capture", "load_model"]

DEFAULT_SEQUENCES = 16  # of each text, where that many fit


@dataclass(frozen=True)
class Recipe:
    """The parameters of a capture."""

    prompt_tokens: int = 128
    new_tokens: int = 128  # sampled after each prompt; at most one fewer are decode rows
    sequences: int | None = None  # of all texts together; None: 16 of each text, or what it holds
    batch: int = 8  # sequences side by side
    temperature: float = 1.0  # 0 is greedy
    seed: int = 0
    token_ids: bool = False  # whether the trace keeps the tokens themselves
    scores: bool = False  # whether it keeps the router's scores of all experts

    def __post_init__(self) -> None:
        for key, low in (("prompt_tokens", 1), ("new_tokens", 0), ("batch", 1), ("seed", 0)):
            if getattr(self, key) < low:
                raise CrispError(
                    f"--{key.replace('_', '-')} {getattr(self, key)}: expected {low} or more"
                )
        if self.sequences is not None and self.sequences < 1:
            raise CrispError(f"--sequences {self.sequences}: expected 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise CrispError(f"--temperature {self.temperature}: expected a number from 0 up")


def capture(
    loaded: LoadedModel,
    texts: Sequence[Path],
    recipe: Recipe,
    progress: Progress = no_progress,
    predict: MagnitudePredictor | None = None,
) -> RoutingTrace:
    """Record the routing of a model that reads windows of ``texts`` and writes on after each.

    progress: called with (rows done, rows at most). predict: foretells magnitudes, which the trace
    keeps then. Raises CrispError for a text that cannot be
    read or is too short, for a length beyond the model's context and for a model not understood.
    """
    _check_context(loaded.model, recipe)
    prompts, dataset = _prompts(loaded.tokenizer, texts, recipe)
    largest = max((max(prompt) for prompt in prompts), default=0)
    check_tokens(largest, loaded.model.config, loaded.name)
    stop = stop_tokens(loaded)
    total = len(prompts) * (recipe.prompt_tokens + max(0, recipe.new_tokens - 1))
    advance = counter(progress, total)
    sequences: list[_Sequence] = []
    with (
        import_extra("torch").inference_mode(),
        record_routing(loaded.model, scores=recipe.scores, predict=predict) as recorder,
    ):
        for first in range(0, len(prompts), recipe.batch):
            batch = list(enumerate(prompts))[first : first + recipe.batch]
            sequences += _run(loaded.model, recorder, batch, recipe, stop, advance)
    return _assemble(sequences, loaded, recorder.layout, recipe, dataset)


@dataclass(frozen=True, eq=False)
class _Sequence:
    """The tokens of one sequence that were fed, and their routing."""

    tokens: list[int]  # in order
    routing: RecordedRouting  # a row for each


def _run(
    model: Any,
    recorder: RoutingRecorder,
    batch: Sequence[tuple[int, list[int]]],
    recipe: Recipe,
    stop: set[int],
    advance: Callable[[int], None],
) -> list[_Sequence]:
    """Run the (sequence number, prompt)s of one batch side by side; return their sequences."""
    torch = import_extra("torch")
    draws = [np.random.default_rng([recipe.seed, number]) for number, _ in batch]
    fed = [list(prompt) for _, prompt in batch]
    alive = [True] * len(batch)
    passes: list[RecordedRouting] = []

    def forward(tokens: Any, cache: dict[str, Any]) -> Any:  # tokens [batch, positions]
        output = model(input_ids=tokens, use_cache=True, **_last_only(model), **cache)
        passes.append(recorder.take())
        advance(tokens.numel())
        return output

    output = forward(torch.tensor(fed, device=model.device), {})  # [batch, prompt tokens]
    for _ in range(recipe.new_tokens - 1):
        logits = output.logits[:, -1].double().cpu().numpy()  # [batch, vocabulary]
        chosen = [
            _sample(row, recipe.temperature, draw) for row, draw in zip(logits, draws, strict=True)
        ]
        for i, token in enumerate(chosen):
            alive[i] = alive[i] and token not in stop
            if alive[i]:
                fed[i].append(token)
        if not any(alive):
            break
        # A finished sequence runs on with the others; its rows are cut off below.
        output = forward(
            torch.tensor(chosen, device=model.device)[:, None], cache_of(output, model)
        )
    return [
        _Sequence(sequence, _rows(passes, len(batch), i, len(sequence)))
        for i, sequence in enumerate(fed)
    ]


def _last_only(model: Any) -> dict[str, int]:
    """Return the arguments that make the model compute the last position's logits only.

    All logits of a long prompt in a large vocabulary would take gigabytes.
    """
    supported = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": 1} if supported else {}


def _rows(passes: Sequence[RecordedRouting], batch: int, which: int, count: int) -> RecordedRouting:
    """Return the first ``count`` rows of sequence ``which`` of a batch, over all its passes."""

    def joined(name: str) -> Any:
        parts = [getattr(routing, name) for routing in passes]  # [batch * positions, layers, k]
        rows = [part.reshape(batch, -1, *part.shape[1:])[which] for part in parts]
        return np.concatenate(rows)[:count]

    extra = {
        name: joined(name)
        for name in ("scores", "magnitudes")
        if getattr(passes[0], name) is not None
    }
    return RecordedRouting(joined("experts"), joined("weights"), joined("guess"), **extra)


def cache_of(output: Any, model: Any) -> dict[str, Any]:
    """Return the argument that gives a pass's cache to the next; transformers 5 renamed it."""
    for name in ("cache", "past_key_values"):
        if output.get(name) is not None:
            return {name: output[name]}
    raise CrispError(f"{type(model).__name__}: returned no cache to go on from; not understood")


def _sample(logits: NDArray[np.float64], temperature: float, draw: np.random.Generator) -> int:
    """Sample a token of softmax(logits [vocabulary] / temperature), by inversion of one draw."""
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(under="ignore"):
        cumulative = np.cumsum(np.exp((logits - logits.max()) / temperature))
    token = int(np.searchsorted(cumulative, draw.random() * cumulative[-1], "right"))
    return min(token, len(cumulative) - 1)


def stop_tokens(loaded: LoadedModel) -> set[int]:
    """Return the ids of the tokens that end a text.

    An id of the generation config counts only if the tokenizer has it as a special token: configs
    often carry their family's default, which in another vocabulary is an ordinary piece of text.
    """
    ids = getattr(loaded.model.generation_config, "eos_token_id", None)
    configured = {*ids} if isinstance(ids, list) else {ids}
    special = {int(token) for token in loaded.tokenizer.all_special_ids}
    of_tokenizer = {loaded.tokenizer.eos_token_id} - {None}
    return (special & configured) | of_tokenizer


def _check_context(model: Any, recipe: Recipe) -> None:
    """Raise CrispError if a sequence is longer than the model's context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = recipe.prompt_tokens + recipe.new_tokens
    if context is not None and length > context:
        raise CrispError(
            f"--prompt-tokens {recipe.prompt_tokens} and --new-tokens {recipe.new_tokens}: "
            f"{length} together; the model's context is {context}"
        )


def _prompts(
    tokenizer: Any, texts: Sequence[Path], recipe: Recipe
) -> tuple[list[list[int]], list[str]]:
    """Return the token ids of the prompts, text after text, and each text's name with its sha256.

    A text is cut into consecutive windows; as many as requested are drawn without replacement and
    kept in the text's order. What the tokenizer puts before a text (a BOS) opens every prompt.
    """
    opening = opening_ids(tokenizer)
    window = recipe.prompt_tokens - len(opening)
    if window < 1:
        raise CrispError(
            f"--prompt-tokens {recipe.prompt_tokens}: no room beside the opening token"
        )
    if recipe.sequences is not None and recipe.sequences < len(texts):
        raise CrispError(f"--sequences {recipe.sequences}: fewer than the {len(texts)} texts")
    prompts: list[list[int]] = []
    dataset: list[str] = []
    for number, path in enumerate(texts):
        text, digest = read_text(path)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        available = len(ids) // window
        requested = even_share(recipe.sequences, len(texts), number)
        if available < (requested or 1):
            raise CrispError(
                f"{path}: {len(ids)} tokens hold {available} prompts of {recipe.prompt_tokens}; "
                f"{requested or 1} expected (--sequences, --prompt-tokens)"
            )
        count = min(available, DEFAULT_SEQUENCES) if requested is None else requested
        # Texts draw from seeds of their own, apart from those of the sequences ([seed, number]).
        draw = np.random.default_rng([recipe.seed, number, 1])
        starts = np.sort(draw.choice(available, count, replace=False)) * window
        prompts += [opening + ids[start : start + window] for start in starts.tolist()]
        dataset.append(f"{path.name} sha256:{digest}")
    return prompts, dataset


def _assemble(
    sequences: Sequence[_Sequence],
    loaded: LoadedModel,
    layout: ExpertLayout,
    recipe: Recipe,
    dataset: Sequence[str],
) -> RoutingTrace:
    """Return the trace of all sequences, with its provenance."""
    lengths = [len(sequence.tokens) for sequence in sequences]
    position = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    experts = np.concatenate([sequence.routing.experts for sequence in sequences])  # [n, layers, k]
    weights = np.concatenate([sequence.routing.weights for sequence in sequences])
    tokens = [token for sequence in sequences for token in sequence.tokens]
    header = Header(
        model=loaded.name,
        revision=loaded.revision,
        config_hash=loaded.spec.config_hash if loaded.spec else None,
        n_experts=layout.n_experts,
        top_k=experts.shape[2],
        dataset="; ".join(dataset),
        tokenizer=f"{loaded.name}, {len(loaded.tokenizer)} tokens",
        origin="captured",
        seed=recipe.seed,
        ordered=True,
        spec=loaded.spec.to_dict() if loaded.spec else None,
        note=f"{len(sequences)} prompts of {recipe.prompt_tokens} tokens, at most "
        f"{recipe.new_tokens} sampled after each at temperature {recipe.temperature:g}, "
        f"batches of {recipe.batch}; {loaded.how}",
    )
    return RoutingTrace(
        experts=experts,
        sequence=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        position=position,
        phase=np.where(position < recipe.prompt_tokens, PREFILL, DECODE).astype(np.uint8),
        weights=half_weights(weights, lambda row: f"{loaded.name}: row {row}"),
        guess=np.concatenate([sequence.routing.guess for sequence in sequences]),
        token=np.array(tokens, np.int32) if recipe.token_ids else None,
        scores=np.concatenate([sequence.routing.scores for sequence in sequences])
        if recipe.scores
        else None,
        magnitudes=np.concatenate([sequence.routing.magnitudes for sequence in sequences])
        if sequences[0].routing.magnitudes is not None
        else None,
        header=header,
    )
