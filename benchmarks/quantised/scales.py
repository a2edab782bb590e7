"""int4 with fitted scales and without, on text that the small models were not trained on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quantised.searches import SEARCHES, searching
from crisp.adapter import Experts, expert_layout
from crisp.checkpoint.loading import load_model, quantize_experts, to_float32
from crisp.model import quantization
from crisp.model.quantization import quantize, weighted_error
from crisp.prepare.calibration import calibrate
from crisp.quality.scores import Scores
from crisp.quality.scoring import score_windows
from crisp.quality.statistics import perplexity, perplexity_ratio, retention
from crisp.text_windows import TokenWindows, read_windows

KINDS = ("code", "docs", "kjv")
CALIBRATION, CHOICE, HELDOUT, WINDOW = 16_384, 49_152, 98_304, 256  # tokens
FITTED = "scales fitted"
# how the page calls it, bits, whether scales are fitted
ROUNDINGS = (
    ("int8", 8, False),
    ("int4", 4, False),
    (f"int4, {FITTED}", 4, True),
    ("3 bits", 3, False),
    (f"3 bits, {FITTED}", 3, True),
)
Tell = Callable[[str], None]


def compare(folder: Path, data: Path, tell: Tell) -> dict[str, Any]:
    """Return perplexities of one model: as published, and rounded in each way.

    Moments are of the first tokens of the calibration text; ways to find int4's scales are compared
    on what follows there, and on the text that no model was trained on.
    """
    texts = {
        part: [data / "data" / f"{kind}.{part}.txt" for kind in KINDS]
        for part in ("calibration", "heldout")
    }
    loaded = to_float32(load_model(str(folder)))
    first = read_windows(loaded.tokenizer, texts["calibration"], WINDOW, limit=CALIBRATION)
    more = read_windows(loaded.tokenizer, texts["calibration"], WINDOW, limit=CALIBRATION + CHOICE)
    choice = _without(more, first)
    heldout = read_windows(loaded.tokenizer, texts["heldout"], WINDOW, limit=HELDOUT)
    tell("calibration")
    layers = calibrate(loaded.model, first).layers
    moments = {
        layer: sums.input_moments.astype(np.float16).astype(np.float32)
        for layer, sums in layers.items()
    }
    tell("as published")
    reference = score_windows(loaded.model, heldout)
    rows, scores = list[dict[str, Any]](), dict[str, Scores]()
    nearest = fitted = None  # on the text for the choice
    for name, bits, fit in ROUNDINGS:
        tell(name)
        given, dtype = moments if fit else None, "int8" if bits == 8 else "int4"
        with _bits(bits):
            fresh = to_float32(load_model(str(folder)))
            error = _error(fresh.model, moments, given, dtype)
            rounded = quantize_experts(fresh, dtype, given)
        scores[name] = score_windows(rounded.model, heldout)
        before = scores[name.partition(",")[0]]
        rows.append(
            {
                "name": name,
                "bits": bits + 0.25,
                "error": error,
                "perplexity": perplexity(scores[name]).value,
                "ratio": _estimate(perplexity_ratio(scores[name], reference)),
                "kept": retention(scores[name], reference).value,
                "over_nearest": _estimate(perplexity_ratio(scores[name], before)) if fit else None,
            }
        )
        if bits == 4 and fit:
            fitted = score_windows(rounded.model, choice)
        elif bits == 4:
            nearest = score_windows(rounded.model, choice)
    tried = {FITTED: (fitted, scores[f"int4, {FITTED}"])}
    for name in SEARCHES:
        tell(name)
        with searching(name):
            rounded = quantize_experts(to_float32(load_model(str(folder))), "int4", moments)
        tried[name] = score_windows(rounded.model, choice), score_windows(rounded.model, heldout)
    spread = {
        layer: float(np.quantile(of_layer, 0.99) / np.median(of_layer))
        for layer, of_layer in moments.items()
    }
    return {
        "name": folder.name,
        "tokens": len(reference.nll),
        "choice_tokens": choice.n_scored,
        "perplexity": perplexity(reference).value,
        "spread": max(spread.values()),
        "rows": rows,
        "tried": [
            {
                "name": name,
                "choice": _estimate(perplexity_ratio(on_choice, nearest)),
                "heldout": _estimate(perplexity_ratio(on_heldout, scores["int4"])),
            }
            for name, (on_choice, on_heldout) in tried.items()
        ],
    }


def _without(windows: TokenWindows, first: TokenWindows) -> TokenWindows:
    """Return the windows behind the first ones of each text."""
    begun, behind = Counter(first.text), list[int]()
    for i, text in enumerate(windows.text):
        begun[text] -= 1
        if begun[text] < 0:
            behind.append(i)
    parts = {
        key: [getattr(windows, key)[i] for i in behind] for key in ("tokens", "scored", "text")
    }
    return dataclasses.replace(windows, **parts)


def _estimate(estimate: Any) -> dict[str, Any]:
    return {"value": estimate.value, "interval": list(estimate.interval)}


def _error(model: Any, moments: dict[int, Any], given: dict[int, Any] | None, dtype: str) -> float:
    """Return the relative error of all experts' products with inputs of these moments."""
    left = whole = 0.0
    for layer in expert_layout(model).layers:
        experts, own = Experts.of(layer), moments[layer.index]
        for expert in range(experts.n_experts):
            up, down = experts.neurons(expert)
            for part, counts in ((up, own), (down, np.ones_like(own))):
                numbers = part.float().numpy().reshape(-1, len(own))
                q, scales = quantize(numbers, dtype, None if given is None else counts)
                error, size = weighted_error(numbers, q, scales, counts)
                left, whole = left + error, whole + size
    return float((left / whole) ** 0.5)


@contextmanager
def _bits(bits: int) -> Iterator[None]:
    """Let int4 have half of its steps within the block, for 3 bits, which no store has."""
    before = quantization._RANGE["int4"], quantization._REACH["int4"]
    if bits == 3:
        quantization._RANGE["int4"], quantization._REACH["int4"] = (-4, 3), (4.5, 3.5)
    try:
        yield
    finally:
        quantization._RANGE["int4"], quantization._REACH["int4"] = before
