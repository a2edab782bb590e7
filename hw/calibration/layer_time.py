"""Measure the time between two events while a real model writes: of attention, routers, all else.

Between two tokens it includes the head and the choice of the next token, so it is the mean over all
layers that adds up to a token's time.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from crisp.hardware.measured import TimeCurve
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.model.generate import generate
from crisp.hw.model.resident import ResidentModel
from crisp.policy import Budget, named
from crisp.run.case import Conditions
from crisp.run.sinks import FullTimeline
from crisp.run.timeline import END, KIND, LAYER, START, STEP

ROWS = (1, 16, 64)  # of a step: a token, and chunks of a prompt
_TOKENS = 24  # that are written
_WARM_UP = 3  # tokens that do not count


def measure_layer_times(model: ResidentModel, options: DeviceOptions) -> TimeCurve:
    """Return the mean time of a layer, without its experts, by the rows of a step.

    Experts run at a width of one block. The prompt is the tokenizer's text of random tokens, and
    every chunk but the first counts.

    Raises CrispError as `crisp.hw.model.generate.generate` does.
    """
    means = [_mean(model, options, rows) for rows in ROWS]
    return TimeCurve(ROWS, tuple(Fraction(max(1, round(ns))) for ns in means))


def _mean(model: ResidentModel, options: DeviceOptions, rows: int) -> float:
    """Generate in steps of ``rows`` rows; return the mean time of a layer in ns."""
    sink, prompt = FullTimeline(), _prompt(model, 4 * max(16, rows))
    spec = model.store.spec
    little = Budget("", None, len(spec.moe_layers) * spec.top_k * spec.block_bytes)
    generate(
        model, named("lru", width="uniform(0.001)", unit="block"), little, options, prompt,
        _TOKENS if rows == 1 else 1, conditions=Conditions("expert", chunk=max(16, rows)),
        sinks=[sink],
    )  # fmt: skip
    timeline = sink.rows
    layers = timeline[timeline[:, KIND] == LAYER]
    prefill = -(-_tokens(model, prompt) // max(16, rows))  # steps
    if rows == 1:
        counted = layers[:, STEP] >= prefill + _WARM_UP
    else:  # the last chunk may be shorter
        counted = (layers[:, STEP] > 0) & (layers[:, STEP] < prefill - 1)
    return float((layers[counted, END] - layers[counted, START]).mean())


def _prompt(model: ResidentModel, tokens: int) -> str:
    """Return a text of about so many tokens."""
    tokenizer, draw = model.loaded.tokenizer, np.random.default_rng(0)
    ids: list[int] = draw.integers(0, len(tokenizer), 2 * tokens).tolist()
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    cut: Any = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:tokens]
    whole: str = tokenizer.decode(cut, skip_special_tokens=True)
    return whole


def _tokens(model: ResidentModel, prompt: str) -> int:
    """Return the number of a text's tokens."""
    tokenizer: Any = model.loaded.tokenizer
    return len(tokenizer(prompt, verbose=False)["input_ids"])
