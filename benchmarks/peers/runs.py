"""Run one contestant in this process: decode one sequence greedily and print the result as JSON.

The clock starts behind the prompt and the first new token.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.peers import model
from benchmarks.peers.llama import llama_cpp


class Enough(Exception):
    """Raised when the time is over."""


class Watch:
    """Records the time of each token, and the process's memory at the last one."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._times = seconds, list[float]()
        self._memory: dict[str, int] = {}

    def tick(self) -> None:
        """Record a token. Raises Enough when the time is over."""
        self._memory = memory()  # a tenth of a millisecond
        self._times.append(time.perf_counter())
        if len(self._times) > 2 and self._times[-1] - self._times[0] > self._seconds:
            raise Enough

    def result(self) -> dict[str, Any]:
        """Return the number of tokens after the first, their time in seconds, and the memory."""
        seconds = self._times[-1] - self._times[0]
        return {"tokens": len(self._times) - 1, "seconds": seconds, **self._memory}


class Streamer:
    """A streamer of transformers' that counts new tokens; the prompt comes first."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._begun = watch, False
        self.tokens: list[int] = []

    def put(self, tokens: Any) -> None:
        """Take the prompt, or one more token."""
        if self._begun:
            self.tokens += tokens.flatten().tolist()
            self._watch.tick()
        self._begun = True

    def end(self) -> None:
        """No-op."""


def transformers(settings: argparse.Namespace, watch: Watch) -> dict[str, Any]:
    """Run transformers with all weights in memory."""
    return _transformers(settings, watch, {})


def accelerate(settings: argparse.Namespace, watch: Watch) -> dict[str, Any]:
    """Run accelerate with all layers on disk except the first ``settings.resident``."""
    config = json.loads((settings.folder / "model" / "config.json").read_text("utf-8"))
    places: dict[str, str] = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places["model.rotary_emb"] = "cpu"
    for layer in range(config["num_hidden_layers"]):
        places[f"model.layers.{layer}"] = "cpu" if layer < settings.resident else "disk"
    how = {"device_map": places, "offload_folder": str(settings.folder / "offload")}
    return _transformers(settings, watch, how)


def _transformers(
    settings: argparse.Namespace, watch: Watch, how: dict[str, Any]
) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings.threads)
    loaded = AutoModelForCausalLM.from_pretrained(
        settings.folder / "model", dtype=torch.bfloat16, **how
    )
    ids, streamer = torch.tensor([model.prompt()]), Streamer(watch)
    with suppress(Enough):
        loaded.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
            max_new_tokens=settings.tokens + 1, streamer=streamer,
        )  # fmt: skip
    return {"ids": streamer.tokens}


def llama(settings: argparse.Namespace, watch: Watch) -> dict[str, Any]:
    """Run llama.cpp with its weights mapped into memory, as they are in the file."""
    return _llama(settings, watch, repack=False)


def llama_repacked(settings: argparse.Namespace, watch: Watch) -> dict[str, Any]:
    """Run llama.cpp with its quantised weights copied in the order that the processor prefers."""
    return _llama(settings, watch, repack=True)


def _llama(settings: argparse.Namespace, watch: Watch, repack: bool) -> dict[str, Any]:
    def on_token() -> bool:
        try:
            watch.tick()
        except Enough:  # it is called from threads of llama.cpp's, which know no exceptions
            return True
        return False

    file = settings.folder / f"{settings.format}.gguf"
    ids, built_for = llama_cpp(file, settings.threads, settings.tokens + 1, repack, on_token)
    return {"ids": ids, "built_for": built_for}


def crisp(settings: argparse.Namespace, watch: Watch) -> dict[str, Any]:
    """Run CRISP with the experts in a store and ``settings.budget`` bytes of them in memory."""
    from crisp.checkpoint.lean.imports import lean_imports
    from crisp.hw.devices.options import DeviceOptions
    from crisp.hw.model.generate import generate
    from crisp.hw.model.resident import open_resident
    from crisp.hw.store.reader import Store
    from crisp.policy import Budget, named
    from crisp.run.case import Conditions

    lean_imports()  # as `crisp generate` does
    store = Store.open(settings.folder / f"{settings.format}-store")
    resident = open_resident(settings.folder / "model", store)
    told: list[str] = []

    def on_text(text: str) -> None:
        told.append(text)
        watch.tick()

    with suppress(Enough):
        generate(
            resident, named("lru"), Budget.parse(f"{settings.budget}B"),
            DeviceOptions(threads=max(1, settings.threads - 1)),  # one more reads
            model.words(model.prompt()), settings.tokens + 1,
            conditions=Conditions(granularity="block"), on_text=on_text,
        )  # fmt: skip
    return {"ids": [int(word[1:]) for word in "".join(told).split()]}


CONTESTANTS: dict[str, Callable[[argparse.Namespace, Watch], dict[str, Any]]] = {
    "crisp": crisp,
    "llama.cpp": llama,
    "llama.cpp repacked": llama_repacked,
    "accelerate": accelerate,
    "transformers": transformers,
}


def memory() -> dict[str, int]:
    """Return this process's bytes of anonymous memory and of mapped files."""
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text("utf-8").splitlines()
    )
    return {name: 1024 * int(status[name].split()[0]) for name in ("RssAnon", "RssFile")}


def code(folder: Path) -> int:
    """Return the bytes of mapped files in memory that are not the model's: mostly libraries."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):  # a mapping begins
            path = fields[5] if len(fields) > 5 else ""
            counts = path.startswith("/") and not path.startswith(str(folder.resolve()))
        elif counts and fields[0] == "Rss:":
            total += 1024 * int(fields[1])
    return total


def main() -> None:
    """Run the contestant that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contestant", choices=CONTESTANTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=("bf16", "int4"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--budget", type=int, default=0, help="crisp: bytes for experts")
    parser.add_argument("--resident", type=int, default=0, help="accelerate: layers in memory")
    settings = parser.parse_args()
    watch = Watch(settings.seconds)
    result = CONTESTANTS[settings.contestant](settings, watch)
    print(json.dumps(result | watch.result() | {"code": code(settings.folder)}))


if __name__ == "__main__":
    main()
