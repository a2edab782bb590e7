"""Which intervals of a writing model count as the time of a layer."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.hw.calibration import layer_time  # noqa: E402
from crisp.hw.devices.options import DeviceOptions  # noqa: E402
from crisp.hw.model.resident import open_resident  # noqa: E402
from crisp.hw.store.packing import pack  # noqa: E402
from crisp.run.timeline import COLUMNS, END, KIND, LAYER, LOAD, START, STEP  # noqa: E402
from tests.hw.model.test_generate import TRACES  # noqa: E402


def test_only_whole_chunks_and_tokens_behind_the_first_count(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 16 take 100 and 104 ns, of 64 400; the first and the last of a prompt take much
    longer, and so do the first three tokens; the others 7 and 9 ns. Loads are no layers."""
    model = open_resident(TRACES / "tiny-mixtral", pack(TRACES / "tiny-mixtral", tmp_path / "s"))
    asked = []

    def generate(
        model: Any, policy: Any, budget: Any, options: Any, prompt: str, new: int, **how: Any
    ) -> None:
        chunk = how["conditions"].chunk
        asked.append((chunk, new))
        steps = -(-len(model.loaded.tokenizer(prompt)["input_ids"]) // chunk)
        times = [
            [10_000],
            *([100, 104] if chunk == 16 else [400] for _ in range(steps - 2)),
            [9999],
        ]
        if new > 1:
            times += [[5_000]] * 3 + [[7, 9]] * (new - 4)
        rows = np.zeros((sum(map(len, times)) + 1, len(COLUMNS)), np.int64)
        rows[:, KIND], rows[-1, KIND] = LAYER, LOAD
        rows[:-1, STEP] = [step for step, own in enumerate(times) for _ in own]
        rows[:-1, START] = 50
        rows[:-1, END] = 50 + np.concatenate(times)
        rows[-1, END] = 10**9
        how["sinks"][0].write(rows)

    monkeypatch.setattr(layer_time, "generate", generate)
    curve = layer_time.measure_layer_times(model, DeviceOptions())
    assert curve.at == (1, 16, 64)
    assert curve.ns == (Fraction(8), Fraction(102), Fraction(400))
    assert asked == [(16, 24), (16, 1), (64, 1)]
