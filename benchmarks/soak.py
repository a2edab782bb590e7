"""Replays and generates under random policies and budgets, for as long as it is told.

Run it with `make soak`. Every run must decide as the simulator does (or, where it prefetches, as a
fresh scheduler that is told what completed when), generation at full width must write what it wrote
the first time, and memory, threads and open files must not grow.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from crisp.hw.decisions import DecisionLog, replay_decisions, same_decisions
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.model.generate import generate
from crisp.hw.model.resident import ResidentModel, open_resident
from crisp.hw.replay import replay
from crisp.hw.store.packing import pack
from crisp.policy import Budget, Policy, named
from crisp.run.case import Case, Conditions
from crisp.run.inputs import LoadedInputs, TraceSource, load_inputs
from crisp.sim.hardware import hardware_profile
from crisp.sim.simulate import simulate
from crisp.trace.fitting import fit_to_trace

MODELS = {"tiny-mixtral": 16, "tiny-deepseek": 16}  # neurons of a block
PROMPT = "def read(path):\n    return "
NEW_TOKENS = 16
WARM_UP = 3  # rounds of which nothing is said: caches fill
SLACK = 24_000_000  # bytes of memory that may come and go


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, its store, and routing of it."""

    model: ResidentModel
    inputs: LoadedInputs


@dataclass(frozen=True)
class Level:
    """What must not grow."""

    memory: int  # bytes of its own (RssAnon)
    files: int
    threads: int

    @classmethod
    def now(cls) -> Level:
        """Of this process; without what Python or the C library would use again before they ask
        for more.
        """
        gc.collect()
        with suppress(AttributeError):  # glibc's
            ctypes.CDLL(None).malloc_trim(0)
        status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        memory = next(line for line in status if line.startswith("RssAnon:"))
        files = sum(1 for _ in Path("/proc/self/fd").iterdir())
        return cls(1024 * int(memory.split()[1]), files, threading.active_count())


def subject(name: str, folder: Path) -> Subject:
    """A small trained model from the checkout, packed."""
    checkpoint = Path(__file__).parents[1] / "traces" / name
    store = pack(checkpoint, folder / name, dtype="fp32", block=MODELS[name])
    inputs = load_inputs(TraceSource.resolve(f"{name}-code"))
    return Subject(open_resident(checkpoint, store), inputs)


def policy(draw: random.Random) -> Policy:
    """Any of them."""
    return named(
        draw.choice(["fo", "lru", "mo", "up", "crisp"]),
        unit=draw.choice(["expert", "block"]),
        scope=draw.choice(["layer", "global"]),
        cache=draw.choice([None, "lfu", "static"]),
    )


def right(case: Case, seen: DecisionLog) -> bool:
    """Whether a measured run decided what it should."""
    if case.policy.prefetch.active:
        return replay_decisions(case, seen)
    expected = DecisionLog()
    simulate(case, hardware_profile("rtx4090-pcie4"), sinks=[expected.sink], watch=expected.watch)
    return same_decisions(seen, expected)


def a_replay(one: Subject, draw: random.Random, chosen: Policy, budget: Budget) -> bool:
    """Of some rows of either phase."""
    conditions = Conditions(
        granularity=draw.choice(["expert", "block"]),
        phase=draw.choice(["decode", "prefill", "all"]),
        batch=draw.choice([1, 1, 3]),
        chunk=draw.choice([16, 512]),
        limit=draw.choice([5, 40]),
    )
    spec = fit_to_trace(one.model.store.spec, one.inputs.trace)
    case, seen = one.inputs.case(spec, chosen, budget, conditions), DecisionLog()
    replay(case, one.model.store, DeviceOptions(), sinks=[seen.sink], watch=seen.watch)
    return right(case, seen)


def a_text(
    one: Subject, draw: random.Random, chosen: Policy, budget: Budget, texts: dict[str, str]
) -> bool:
    """Written by the model; at full width always the same."""
    conditions, seen = (
        Conditions(granularity=draw.choice(["expert", "block"]), phase="all"),
        DecisionLog(),
    )
    made = generate(
        one.model, chosen, budget, DeviceOptions(), PROMPT, NEW_TOKENS,
        profile=one.inputs.profile, conditions=conditions, sinks=[seen.sink], watch=seen.watch,
    )  # fmt: skip
    if chosen.to_dict()["width"] == "full":
        first = texts.setdefault(one.model.loaded.name, made.text)
        if made.text != first:
            print(f"  wrote {made.text!r}, before {first!r}")
            return False
    spec = one.model.store.spec
    written = replace(one.inputs, trace=made.trace)
    return right(written.case(spec, chosen, budget, conditions), seen)


def soak(seconds: float, seed: int) -> int:
    """Rounds until the time is over; the number of faults found."""
    draw, texts, faults, level = random.Random(seed), dict[str, str](), 0, None
    with tempfile.TemporaryDirectory() as folder:
        subjects = [subject(name, Path(folder)) for name in MODELS]
        end, rounds = time.monotonic() + seconds, 0
        while time.monotonic() < end or rounds <= WARM_UP:
            one, chosen = draw.choice(subjects), policy(draw)
            budget = Budget.parse(draw.choice(["2%", "10%", "25%", "50%", "90%", "100%"]))
            if draw.random() < 0.5:
                what, good = "replay", a_replay(one, draw, chosen, budget)
            else:
                what, good = "generate", a_text(one, draw, chosen, budget, texts)
            rounds += 1
            if not good:
                faults += 1
                print(f"round {rounds}, seed {seed}: {what} of {one.model.loaded.name}, "
                      f"{chosen.to_dict()} at {budget.text}: not as it should be")  # fmt: skip
            if rounds == WARM_UP:
                level = Level.now()
        assert level is not None
        after = Level.now()
    print(f"{rounds} rounds in {seconds:.0f} s, seed {seed}: {faults} faults")
    for name, allowed in (("memory", SLACK), ("files", 0), ("threads", 0)):
        before, now = getattr(level, name), getattr(after, name)
        grew = now - before > allowed
        faults += grew
        print(f"  {name}: {before:,} after {WARM_UP} rounds, {now:,} at the end"
              f"{': GREW' if grew else ''}")  # fmt: skip
    return faults


def main() -> int:
    """Say what was found; 1 if anything was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    return 1 if soak(asked.seconds, asked.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
