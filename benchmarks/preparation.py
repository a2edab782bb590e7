"""Time preparation against plain work, both in this run, as ratios. Run it with `make bench`.

Calibration (counts, importance, sizes of what experts add) against a plain forward pass with
`eager` experts, both without the language-model head; and reordering a checkpoint, with its hash,
against copying the file. Reordering leaves its result on the disk, and so does the copy it is
compared with; the time of a copy that only reaches the page cache is printed beside.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from crisp.adapter import expert_layout
from crisp.prepare.calibration import batch_windows, calibrate, to_token_ids
from crisp.prepare.reorder import reorder
from crisp.text_windows import TokenWindows

TINY = Path(__file__).parents[1] / "traces" / "tiny-mixtral"
REPEATS = 9
TOKENS, WINDOW = 4096, 256
LAYERS, D_MODEL, D_FF, EXPERTS = 3, 1024, 3584, 8  # of the checkpoint: 529 MB of experts

Work = Mapping[str, Callable[[], object]]


def taken_in_turns(work: Work, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the seconds of each work, repeat by repeat, after one that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(-1, REPEATS):
        for name, call in work.items() if repeat % 2 else reversed(work.items()):
            begin = clock()
            call()
            if repeat >= 0:
                times[name].append(clock() - begin)
    return times


def ratio(plain: Sequence[float], ours: Sequence[float]) -> str:
    """Return the ratio of speeds: fastest of each, and pair by pair."""
    pairs = sorted(a / b for a, b in zip(plain, ours, strict=True))
    return (
        f"{min(plain) / min(ours):5.2f}  (pair by pair {pairs[len(pairs) // 2]:.2f}, "
        f"{pairs[0]:.2f} to {pairs[-1]:.2f})"
    )


def small() -> Any:
    """Return the trained model of the repository."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32, experts_implementation="eager"
    ).eval()


def large() -> Any:
    """Return a random Mixtral whose experts are large enough to count."""
    config = transformers.MixtralConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=1792, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, num_local_experts=EXPERTS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    return model.eval()


def calibration(model: Any) -> dict[str, list[float]]:
    """Return the processor time of a plain pass and of one that calibrates."""
    random = np.random.default_rng(0)
    cut = [random.integers(3, 2048, WINDOW) for _ in range(TOKENS // WINDOW)]
    windows = TokenWindows(cut, [WINDOW - 1] * len(cut), [0] * len(cut), [], WINDOW, WINDOW)

    def plain() -> None:
        with torch.inference_mode():
            for batch in batch_windows(cut):
                model.base_model(input_ids=to_token_ids(batch, model), use_cache=False)

    work = {"plain": plain, "ours": lambda: calibrate(model, windows)}
    return taken_in_turns(work, time.process_time)


def checkpoint(folder: Path) -> Any:
    """Write a random Mixtral, one tensor per expert, in one file; return its layout."""
    config = transformers.MixtralConfig(
        vocab_size=512, hidden_size=D_MODEL, intermediate_size=D_FF, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=2, num_local_experts=EXPERTS,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layout = expert_layout(model)
    model.to_empty(device="cpu")
    for weight in model.parameters():
        weight.data.normal_(std=0.02)
    model.save_pretrained(folder, max_shard_size="100GB")
    return layout


def reordering(folder: Path) -> dict[str, list[float]]:
    """Return the times of copying the file, of copying it to the disk, and of reordering it."""
    source, out, copy = folder / "source", folder / "out", folder / "copy"
    layout = checkpoint(source)
    random = np.random.default_rng(0)
    orders = {
        layer: np.stack([random.permutation(D_FF) for _ in range(EXPERTS)])
        for layer in range(LAYERS)
    }

    def copied(durable: bool) -> None:
        shutil.copyfile(source / "model.safetensors", copy)
        if durable:
            with copy.open("rb+") as file:
                os.fsync(file.fileno())
        copy.unlink()

    def ours() -> None:
        out.mkdir()
        reorder(source, out, orders, layout)
        shutil.rmtree(out)

    work = {"cached": lambda: copied(False), "copy": lambda: copied(True), "ours": ours}
    return taken_in_turns(work, time.perf_counter)


def main() -> None:
    """Print the ratios; the aims are 0.7 and 0.6."""
    transformers.utils.logging.disable_progress_bar()
    print(f"calibration against a plain pass of {TOKENS} tokens, processor time, {REPEATS} pairs:")
    for name, make_model in (("tiny-mixtral", small), ("d_model 512, d_ff 1792", large)):
        times = calibration(make_model())
        print(f"  {name:24} {ratio(times['plain'], times['ours'])}  (aim: at least 0.7)")
    with tempfile.TemporaryDirectory() as folder:
        times = reordering(Path(folder))
    size = LAYERS * EXPERTS * 3 * D_MODEL * D_FF * 2 / 1e6
    print(f"reordering {size:.0f} MB, with its hash, against copying, {REPEATS} turns:")
    print(f"  to the disk              {ratio(times['copy'], times['ours'])}  (aim: at least 0.6)")
    print(f"  to the page cache        {ratio(times['cached'], times['ours'])}")


if __name__ == "__main__":
    main()
