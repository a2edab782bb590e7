"""Replay and generate under random policies and budgets for a given time, and check every run.

Run it with `make soak`. Every run must decide as the simulator does (or, where it prefetches, as a
fresh scheduler that is fed the run's completions), generation at full width must write the same
text each time, and memory, threads and open files must not grow.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from crisp.hw.decisions import DecisionLog, replay_decisions, same_decisions
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.memory import return_freed_memory
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
WARM_UP = 3  # rounds that do not count, in which caches fill
SLACK = 24_000_000  # bytes by which memory may vary


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, its store, and a trace of it."""

    model: ResidentModel
    inputs: LoadedInputs


@dataclass(frozen=True)
class Level:
    """The process's resources that must not grow."""

    memory: int  # bytes of its own (RssAnon)
    files: int
    threads: int

    @classmethod
    def now(cls) -> Level:
        """Return this process's level, without memory that Python or the C library would reuse
        before they ask for more.
        """
        gc.collect()
        return_freed_memory()
        status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        memory = next(line for line in status if line.startswith("RssAnon:"))
        files = sum(1 for _ in Path("/proc/self/fd").iterdir())
        return cls(1024 * int(memory.split()[1]), files, threading.active_count())


def subject(name: str, folder: Path) -> Subject:
    """Pack and load a small trained model of the checkout."""
    checkpoint = Path(__file__).parents[1] / "traces" / name
    store = pack(checkpoint, folder / name, dtype="fp32", block=MODELS[name])
    inputs = load_inputs(TraceSource.resolve(f"{name}-code"))
    return Subject(open_resident(checkpoint, store), inputs)


def policy(draw: random.Random) -> Policy:
    """Draw a policy."""
    return named(
        draw.choice(["fo", "lru", "mo", "up", "crisp"]),
        unit=draw.choice(["expert", "block"]),
        scope=draw.choice(["layer", "global"]),
        cache=draw.choice([None, "lfu", "static"]),
    )


def decided_right(case: Case, log: DecisionLog) -> bool:
    """Return whether a measured run decided what it should."""
    if case.policy.prefetch.active:
        return replay_decisions(case, log)
    expected = DecisionLog()
    simulate(case, hardware_profile("rtx4090-pcie4"), sinks=[expected.sink], watch=expected.watch)
    return same_decisions(log, expected)


def check_replay(one: Subject, draw: random.Random, chosen: Policy, budget: Budget) -> bool:
    """Replay some rows of either phase; return whether the decisions were right."""
    conditions = Conditions(
        granularity=draw.choice(["expert", "block"]),
        phase=draw.choice(["decode", "prefill", "all"]),
        batch=draw.choice([1, 1, 3]),
        chunk=draw.choice([16, 512]),
        limit=draw.choice([5, 40]),
    )
    spec = fit_to_trace(one.model.store.spec, one.inputs.trace)
    case, log = one.inputs.case(spec, chosen, budget, conditions), DecisionLog()
    replay(case, one.model.store, DeviceOptions(), sinks=[log.sink], watch=log.watch)
    return decided_right(case, log)


def check_text(
    one: Subject, draw: random.Random, chosen: Policy, budget: Budget, texts: dict[str, str]
) -> bool:
    """Generate a text; return whether the decisions were right (at full width the text, too)."""
    conditions, log = (
        Conditions(granularity=draw.choice(["expert", "block"]), phase="all"),
        DecisionLog(),
    )
    made = generate(
        one.model, chosen, budget, DeviceOptions(), PROMPT, NEW_TOKENS,
        profile=one.inputs.profile, conditions=conditions, sinks=[log.sink], watch=log.watch,
    )  # fmt: skip
    if chosen.to_dict()["width"] == "full":
        first = texts.setdefault(one.model.loaded.name, made.text)
        if made.text != first:
            print(f"  wrote {made.text!r}, before {first!r}")
            return False
    spec = one.model.store.spec
    written = replace(one.inputs, trace=made.trace)
    return decided_right(written.case(spec, chosen, budget, conditions), log)


def soak(seconds: float, seed: int) -> int:
    """Run rounds until the time is over; return the number of faults."""
    draw, texts, faults, level = random.Random(seed), dict[str, str](), 0, None
    with tempfile.TemporaryDirectory() as folder:
        subjects = [subject(name, Path(folder)) for name in MODELS]
        end, rounds = time.monotonic() + seconds, 0
        while time.monotonic() < end or rounds <= WARM_UP:
            one, chosen = draw.choice(subjects), policy(draw)
            budget = Budget.parse(draw.choice(["2%", "10%", "25%", "50%", "90%", "100%"]))
            if draw.random() < 0.5:
                what, good = "replay", check_replay(one, draw, chosen, budget)
            else:
                what, good = "generate", check_text(one, draw, chosen, budget, texts)
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
    """Print what was found; 1 if there were faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    return 1 if soak(options.seconds, options.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
