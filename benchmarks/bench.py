"""Time the simulator against a bare SimPy loop, both in this run, as a ratio.

Run it with `make bench`. The bare loop is what one writes first: a process for each expert, a
resource for the link and one for compute, nothing decided and nothing recorded. The simulator runs
policy `crisp` at Mixtral's size (32 layers, 8 experts, top-2), budget 10 %, unit and granularity
expert, with its timeline written to a file. Without one, the fast engine is timed beside it, once
it has been compiled.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import simpy

from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.run.case import Case
from crisp.run.inputs import LoadedInputs
from crisp.run.result import Run
from crisp.run.sinks import parquet
from crisp.sim.fast_simulate import fast_simulate
from crisp.sim.hardware import hardware_profile
from crisp.sim.simulate import simulate
from crisp.trace import Header, RoutingTrace
from crisp.trace.fitting import fit_to_trace

LAYERS, EXPERTS, TOP_K = 32, 8, 2
TOKENS = 1000
FAST_TOKENS = 50_000
REPEATS = 7


def trace(tokens: int) -> RoutingTrace:
    """Return skewed random routing: the higher its number, the rarer an expert."""
    random, skew = np.random.default_rng(0), np.linspace(0, 0.6, EXPERTS)
    experts = np.empty((tokens, LAYERS, TOP_K), np.int16)
    for token in experts:  # one at a time: the peak of memory is measured too
        token[:] = (random.random((LAYERS, EXPERTS)) + skew).argsort(axis=1)[:, :TOP_K]
    return RoutingTrace(
        experts=experts,
        sequence=np.zeros(tokens, np.int32),
        position=np.arange(tokens, dtype=np.int32),
        phase=np.ones(tokens, np.uint8),
        header=Header(n_experts=EXPERTS, top_k=TOP_K, ordered=True, origin="synthetic"),
    )


def bare_loop(tokens: int) -> None:
    """Run two experts a layer, loaded and computed by a process each, then a barrier."""
    env = simpy.Environment()
    link, compute = simpy.Resource(env), simpy.Resource(env)

    def expert(width: float) -> Iterator[Any]:
        for stream, duration in ((link, 7.5), (compute, 0.8)):
            with stream.request() as turn:
                yield turn
                yield env.timeout(duration * width)

    def model() -> Iterator[Any]:
        for _ in range(tokens * LAYERS):
            yield env.timeout(0.4)
            yield simpy.AllOf(env, [env.process(expert(1.0)), env.process(expert(0.5))])

    env.process(model())  # type: ignore[arg-type]
    env.run()


def case(routing: RoutingTrace, policy: str) -> Case:
    """Return the case of a trace under a policy."""
    spec = fit_to_trace(ModelSpec.named("mixtral-8x7b"), routing)
    counts = Profile.from_trace(routing.select(slice(0, 200)))
    return LoadedInputs(routing, counts).case(spec, named(policy), Budget.parse("10%"))


def simulator(routing: RoutingTrace, out: Path) -> None:
    """Run the whole simulation: plan, events, decisions, timeline, metrics."""
    with parquet(out) as sink:
        simulate(case(routing, "crisp"), hardware_profile("paper-table1"), sinks=[sink])


def without_timeline(run: Callable[..., Run], routing: RoutingTrace, policy: str) -> float:
    """Return tokens/s of the whole run but for its timeline, the fastest of some."""
    run(case(routing.select(slice(0, 10)), policy), hardware_profile("paper-table1"))  # compiles
    times = [
        seconds(lambda: run(case(routing, policy), hardware_profile("paper-table1")))
        for _ in range(REPEATS)
    ]
    return routing.rows / min(times)


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time of the work, which other jobs disturb least."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def peak_mb(tokens: int) -> float:
    """Return the peak memory, MB, of a process that simulates so many tokens."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak", str(tokens)],
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout)


def main() -> None:
    """Print both rates, their ratio, and memory against the length of the trace."""
    routing = trace(TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "timeline.parquet"
        if sys.argv[1:2] == ["--peak"]:
            simulator(trace(int(sys.argv[2])), out)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            return
        pairs = [
            (seconds(lambda: bare_loop(TOKENS)), seconds(lambda: simulator(routing, out)))
            for _ in range(REPEATS)
        ]
    ratios = sorted(bare / ours for bare, ours in pairs)
    bare, ours = (TOKENS / min(times) for times in zip(*pairs, strict=True))
    print(f"{TOKENS} tokens of {LAYERS} layers, {REPEATS} pairs, processor time, fastest of each:")
    print(f"  bare SimPy loop           {bare:8.0f} tokens/s")
    print(f"  simulator, timeline kept  {ours:8.0f} tokens/s")
    print(f"  ratio                     {ours / bare:8.2f}  (aim: at least 1)")
    print(f"  ratio pair by pair        {ratios[len(ratios) // 2]:8.2f}  "
          f"(median; {ratios[0]:.2f} to {ratios[-1]:.2f})")  # fmt: skip
    long = trace(FAST_TOKENS)
    print(f"without a timeline, fastest of {REPEATS}; the fast engine over {FAST_TOKENS} tokens:")
    for policy in ("lru", "crisp"):
        model, fast = (
            without_timeline(simulate, routing, policy),
            without_timeline(fast_simulate, long, policy),
        )
        print(f"  {policy:<6} SimPy model {model:6.0f} tokens/s, fast engine {fast:7.0f} tokens/s, "
              f"{fast / bare:.0f} x the bare loop  (aim: at least 100)")  # fmt: skip
    for tokens in (2_000, 20_000):
        print(f"  peak memory of {tokens:6d} tokens {peak_mb(tokens):6.0f} MB, trace included "
              f"({tokens * LAYERS * TOP_K * 2 / 1e6:.1f} MB)")  # fmt: skip


if __name__ == "__main__":
    main()
