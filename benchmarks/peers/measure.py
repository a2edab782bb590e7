"""Run all contestants under all caps, by turns, and return the record of docs/peers.json."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers import model
from benchmarks.peers.caps import (
    SHARES,
    SMALLEST,
    caps,
    crisp_budget,
    least_cap,
    resident_layers,
    without_experts,
)
from benchmarks.peers.cgroup import Group
from crisp.errors import CrispError
from crisp.hw.store.reader import Store

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 150  # seconds that a run may take, loading and prompt included
CAPPED = {
    "bf16": ("crisp", "llama.cpp", "accelerate"),
    "int4": ("crisp", "llama.cpp", "llama.cpp repacked"),
}
RESIDENT = {
    "bf16": ("crisp", "llama.cpp", "transformers"),
    "int4": CAPPED["int4"],
}
_LAYER_BYTES = model.EXPERTS * model.EXPERT_BYTES

Result = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """Where and how contestants run."""

    group: Group
    folder: Path
    settings: argparse.Namespace
    say: Callable[[str], None]

    def short(self) -> Bench:
        """Return the same with runs of two tokens."""
        return replace(self, settings=argparse.Namespace(**vars(self.settings) | {"tokens": 2}))

    def run(self, format: str, name: str, cap: int | None, **options: int) -> Result:
        """Run one contestant once; return its result, or as ``failed`` why there is none."""
        how = {
            "format": format, "threads": self.settings.threads, "tokens": self.settings.tokens,
            "seconds": self.settings.seconds, **options,
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.peers.runs", name, str(self.folder)]
        command += [part for key, value in how.items() for part in (f"--{key}", str(value))]
        self.group.limit(cap)
        try:
            done = self.group.run(command, PATIENCE, cwd=ROOT)
        except subprocess.TimeoutExpired:
            return {"failed": f"no end after {PATIENCE} s"}
        finally:
            self.group.limit(None)
        if done.returncode:
            return {"failed": why(done.returncode, done.stderr)}
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def why(code: int, stderr: str) -> str:
    """Return in a few words why a process with this exit code gave no result."""
    if code in (-9, 137):
        return "killed: out of memory"
    if code < 0:
        return f"dies: {signal.Signals(-code).name}"
    last = stderr.strip().splitlines()[-1:] or [f"exit code {code}"]
    return f"refuses: {last[0][:120]}"


def measure(bench: Bench, formats: tuple[str, ...]) -> Result:
    """Run everything; return the content of docs/peers.json but for its conditions."""
    return {format: _measure_format(bench, format) for format in formats}


def _measure_format(bench: Bench, format: str) -> Result:
    spec = Store.open(bench.folder / f"{format}-store").spec
    bases = _bases(bench, format)
    least = least_cap(bases["crisp"], lambda cap: _runs_in(bench, format, cap))
    all_caps = caps(least, spec.routed_bytes)

    def run(name: str, cap: int | None) -> tuple[dict[str, int], Result]:
        options = {}
        if name == "crisp":
            options["budget"] = crisp_budget(all_caps[-1] if cap is None else cap, least)
        elif name == "accelerate" and cap is not None:
            fit = resident_layers(cap, bases["accelerate"], _LAYER_BYTES)
            options["resident"] = min(spec.n_layers, fit)
        result = bench.run(format, name, cap, **options)
        while "failed" in result and options.get("resident"):  # it gets what it can run with
            options["resident"] //= 2
            result = bench.run(format, name, cap, **options)
        return options, result

    todo = list(turns(format, all_caps, bench.settings.repeats))
    runs, given_up = list[Result](), set[tuple[str, int | None]]()
    for number, (turn, name, cap) in enumerate(todo, 1):
        if (name, cap) in given_up:
            continue
        options, result = run(name, cap)
        where = "no cap" if cap is None else f"{cap / 1e6:.0f} MB"
        bench.say(f"{number}/{len(todo)} {format}, {where}, {name}: {outcome(result)}")
        if "failed" in result:
            given_up.add((name, cap))
        if turn:  # the text is the same in all turns
            result.pop("ids", None)
        runs.append({"contestant": name, "cap": cap, "turn": turn, **options, **result})
    return {
        "expert_bytes": spec.routed_bytes, "bases": bases, "least": least,
        "shares": SHARES, "caps": all_caps, "runs": runs,
    }  # fmt: skip


def _bases(bench: Bench, format: str) -> dict[str, int]:
    """Return the bytes that CRISP and accelerate take without experts, from runs without a cap."""
    bases = {}
    for name in {"crisp", "accelerate"} & set(CAPPED[format]):
        option = {"budget": SMALLEST} if name == "crisp" else {"resident": 0}
        result = bench.short().run(format, name, None, **option)
        if "failed" in result:
            raise CrispError(f"{name}, without a cap: {result['failed']}")
        if name == "crisp":  # all other weights are mapped from the checkpoint
            held = SMALLEST - (int(result["RssFile"]) - int(result["code"]))
        else:  # it has dropped the layer that it loaded last
            held = -_LAYER_BYTES
        bases[name] = without_experts(result, held)
    return bases


def _runs_in(bench: Bench, format: str, cap: int) -> bool:
    result = bench.short().run(format, "crisp", cap, budget=SMALLEST)
    bench.say(f"{format}, crisp in {cap / 1e6:.0f} MB: {outcome(result)}")
    return "failed" not in result


def turns(format: str, all_caps: list[int], repeats: int) -> Iterator[tuple[int, str, int | None]]:
    """Yield every run: in each turn all contestants under all caps, each turn another first."""
    for turn in range(repeats):
        for cap in (*all_caps, None):
            names = RESIDENT[format] if cap is None else CAPPED[format]
            for place in range(len(names)):
                yield turn, names[(place + turn) % len(names)], cap


def outcome(result: Result) -> str:
    """Return what became of a run in a few words."""
    if "failed" in result:
        return str(result["failed"])
    return f"{result['tokens'] / result['seconds']:.2f} tokens/s"


def instruction_sets(text: str) -> str:
    """Return what llama.cpp says it was built for, such as "SSE3, AVX2", from its own line."""
    parts = (part.strip().removeprefix("CPU :") for part in text.split("|"))
    return ", ".join(part.removesuffix("= 1").strip() for part in parts if part.endswith("= 1"))
