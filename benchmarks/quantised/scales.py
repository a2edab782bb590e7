"""int4 with and without the search of scales, on text that the small models were not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from crisp.adapter import Experts, expert_layout
from crisp.checkpoint.loading import load_model, quantize_experts, to_float32
from crisp.model import quantization
from crisp.model.quantization import quantize, weighted_error
from crisp.prepare.calibration import calibrate
from crisp.quality.scoring import score_windows
from crisp.quality.statistics import perplexity, perplexity_ratio, retention
from crisp.text_windows import read_windows

KINDS = ("code", "docs", "kjv")
CALIBRATION, HELDOUT, WINDOW = 16_384, 18_432, 256  # tokens
Tell = Callable[[str], None]


def compare(folder: Path, data: Path, tell: Tell) -> dict[str, Any]:
    """Return perplexities of one model: as published, and rounded in each way."""
    texts = {
        part: [data / "data" / f"{kind}.{part}.txt" for kind in KINDS]
        for part in ("calibration", "heldout")
    }
    loaded = to_float32(load_model(str(folder)))
    calibration = read_windows(loaded.tokenizer, texts["calibration"], WINDOW, limit=CALIBRATION)
    heldout = read_windows(loaded.tokenizer, texts["heldout"], WINDOW, limit=HELDOUT)
    tell("calibration")
    layers = calibrate(loaded.model, calibration).layers
    moments = {
        layer: sums.input_moments.astype(np.float16).astype(np.float32)
        for layer, sums in layers.items()
    }
    tell("as published")
    reference = score_windows(loaded.model, heldout)
    rows, before = list[dict[str, Any]](), reference
    for name, bits, searched in (
        ("int8", 8, False),
        ("int4", 4, False),
        ("int4, scales searched", 4, True),
        ("3 bits", 3, False),
        ("3 bits, scales searched", 3, True),
    ):
        tell(name)
        given = moments if searched else None
        with _bits(bits):
            fresh = to_float32(load_model(str(folder)))
            error = _error(fresh.model, moments, given, "int8" if bits == 8 else "int4")
            rounded = quantize_experts(fresh, "int8" if bits == 8 else "int4", given)
        scores = score_windows(rounded.model, heldout)
        rows.append(
            {
                "name": name,
                "bits": bits + 0.25,
                "error": error,
                "perplexity": perplexity(scores).value,
                "ratio": _estimate(perplexity_ratio(scores, reference)),
                "kept": retention(scores, reference).value,
                "over_nearest": _estimate(perplexity_ratio(scores, before)) if searched else None,
            }
        )
        before = scores
    spread = {
        layer: float(np.quantile(of_layer, 0.99) / np.median(of_layer))
        for layer, of_layer in moments.items()
    }
    return {
        "name": folder.name,
        "tokens": len(reference.nll),
        "perplexity": perplexity(reference).value,
        "spread": max(spread.values()),
        "rows": rows,
    }


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
