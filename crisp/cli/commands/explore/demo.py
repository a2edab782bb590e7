"""``crisp demo``: five policies on two machines, from a real model's routing."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from crisp.policy import Policy
    from crisp.report.plots import Line
    from crisp.run.result import Run
    from crisp.run.setup import Setup
    from crisp.run.timeline import Rows
    from crisp.sim.experiment import PlannedRun

TRACE, MODEL, BITS = "tiny-mixtral-code", "mixtral-8x7b", "4.25"
MACHINES = {
    "rtx4090-pcie4": "experts come from host memory over PCI Express",
    "jetson-agx-orin-32gb": "experts are copied within the one memory",
}
POLICIES = {
    "fo": "full offloading: every expert is loaded for every token, nothing overlaps",
    "lru": "a layer's most recently used experts stay; loading and computing overlap",
    "mo": "lru, and {ahead} is prefetched (MoE-Offload)",
    "up": "lru, of every expert only the leading half (uniform pruning)",
    "crisp": "lru; for a rarer pair, the second expert at half width or skipped; "
    "the widest loads first",
}
BUDGETS, ROWS = ("10%", "20%", "30%", "40%", "50%"), 1000
QUICK_BUDGETS, QUICK_ROWS = ("10%", "50%"), 60
_DRAWN, _DRAWN_AT, _DRAWN_ROWS, _SETTLED = ("lru", "crisp"), "30%", 400, 50
_FEW = {2: "two", 3: "three", 4: "four", 5: "five"}
_NEAR_ENOUGH = 0.1  # of the medians, deviations of both timelines together


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures and runs.")] = Path("out"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rows and budgets.")] = False,
) -> None:
    """Five policies on two machines, with pictures."""
    from crisp.cli.options.files import check_outputs
    from crisp.cli.output.progress import progress
    from crisp.errors import CrispError
    from crisp.run.result import save_runs
    from crisp.sim.experiment import run_all

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CrispError(f"--out {out}: cannot be made: {error.strerror or error}") from error
    runs_file, throughput_file, token_file = (
        out / name for name in ("runs.json", "throughput.png", "token.png")
    )
    for file in (runs_file, throughput_file, token_file):
        check_outputs({"--out": file}, [])
    budgets = QUICK_BUDGETS if quick else BUDGETS
    setups = [_setup(machine, QUICK_ROWS if quick else ROWS) for machine in MACHINES]
    planned = [run for setup in setups for run in _plan(setup, budgets)]
    _say(_opening(setups[0]))
    with progress("runs", len(planned)) as advance:
        runs = run_all(planned, lambda: advance(1))

    each = len(runs) // len(setups)
    of_machine = [runs[place : place + each] for place in range(0, len(runs), each)]
    for setup, machine_runs in zip(setups, of_machine, strict=True):
        name = setup.machine
        _say(["", f"{name}: {MACHINES[name]}", *format_speeds(machine_runs, budgets)])
    _say(["", *_reading(setups[0], runs)])
    save_runs(runs, runs_file)
    _draw_speeds(setups[0], of_machine, throughput_file)
    _draw_token(setups[0], token_file)
    _say(["", *_next(out, each)])


def _setup(machine: str, limit: int) -> Setup:
    from crisp.run.case import Conditions
    from crisp.run.setup import load_setup
    from crisp.sim.hardware import hardware_profile

    hardware, conditions = hardware_profile(machine), Conditions(limit=limit)
    return load_setup(TRACE, model=MODEL, bits=BITS, hardware=hardware, conditions=conditions)


def _policy(setup: Setup, name: str) -> Policy:
    from crisp.policy import named

    return named(name, has_guess=setup.inputs.trace.guess is not None)


def _plan(setup: Setup, budgets: Sequence[str]) -> list[PlannedRun]:
    from crisp.sim.experiment import plan_run

    policies = [_policy(setup, name) for name in POLICIES]
    return [plan_run(setup, policy, budget) for policy in policies for budget in budgets]


def _opening(setup: Setup) -> list[str]:
    from crisp.cli.output.setup_lines import describe_setup
    from crisp.policy.prefetch import ROUTER

    guessed = _policy(setup, "mo").prefetch.source == ROUTER
    ahead = "what the next layer's router is guessed to choose"
    lines = [
        "A model whose experts do not fit on the device, simulated from a real model's routing.",
        "",
    ]
    lines += [line for line in describe_setup(setup) if not line.startswith("hardware")]
    for name, text in POLICIES.items():
        what = text.format(ahead=ahead if guessed else "what the previous token used")
        lines.append(f"  {name:<8}{what}")
    lines.insert(len(lines) - len(POLICIES), "policies")
    return lines


def format_speeds(runs: Sequence[Run], budgets: Sequence[str]) -> list[str]:
    """Return a table of one machine's tokens/s and MB/token: a line a policy, a column a budget."""
    from crisp.cli.output.columns import align_columns

    policies = list(dict.fromkeys(run.settings["policy"]["name"] for run in runs))
    halves = []
    for head, metric, factor in (
        ("tokens/s at a budget of", "tokens_per_second", 1.0),
        ("MB loaded a token", "decode_bytes_per_token", 1e-6),
    ):
        values = [float(run.metrics[metric] or 0) * factor for run in runs]
        shown = [f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values]
        columns = [shown[place :: len(budgets)] for place in range(len(budgets))]
        halves.append([head, *align_columns(budgets, columns, text=0)])
    width = max(map(len, halves[0])) + 4
    names = ["", "policy", *policies]
    return [
        f"{name:<8}{left:<{width}}{right}" for name, left, right in zip(names, *halves, strict=True)
    ]


def _reading(setup: Setup, runs: Sequence[Run]) -> list[str]:
    lines = [
        f"tokens/s are of these {setup.spec.n_layers} layers, not of a whole model; budgets are "
        "shares of all routed experts.",
        _whole(setup, runs),
        "Quality is not simulated, so speed alone does not rank policies: up leaves out half of "
        "every",
        "expert and crisp parts of rarer pairs, which costs accuracy; fo, lru and mo change "
        "nothing.",
    ]
    loaded = {
        name: sum(
            run.metrics["bytes_loaded"] or 0
            for run in runs
            if run.settings["policy"]["name"] == name
        )
        for name in ("lru", "mo")
    }
    if loaded["mo"] > loaded["lru"]:
        more = 100 * (loaded["mo"] / loaded["lru"] - 1)
        lines.append(f"mo sometimes guesses wrongly: overall it loads {more:.0f} % more than lru.")
    return lines


def _whole(setup: Setup, runs: Sequence[Run]) -> str:
    """Say what is left of the budgets, which are floored to whole experts."""
    from crisp.cli.output.run_tables import units_held

    policy = next(run for run in runs if run.settings["policy"]["name"] == "lru").settings["policy"]
    budgets = list(dict.fromkeys(run.settings["budget"]["asked"] for run in runs))
    shares = [text.removesuffix("%") for text in budgets]
    held = [units_held(text, setup, policy) for text in budgets]
    line = (
        f"{', '.join(shares)} % of {held[0][1]} experts: "
        f"{', '.join(str(units) for units, _, _ in held)} whole ones"
    )
    for number, (_, _, empty) in zip(shares, held, strict=True):
        if empty:
            layers = "one layer holds" if empty == 1 else f"{_FEW.get(empty, empty)} layers hold"
            line += f"; at {number} % {layers} none"
    return f"{line}."


def _draw_speeds(setup: Setup, of_machine: Sequence[Sequence[Run]], path: Path) -> None:
    from crisp.report.plots import Line, draw_throughput

    panels = {}
    for machine, runs in zip(MACHINES, of_machine, strict=True):
        panels[machine] = [
            Line(
                name,
                [float(run.settings["budget"]["share"]) for run in policy_runs],
                [float(run.metrics["tokens_per_second"] or 0) for run in policy_runs],
                "--" if name == "up" else "-",
            )
            for name in POLICIES
            if (policy_runs := [run for run in runs if run.settings["policy"]["name"] == name])
        ]
        panels[machine].append(_bound(runs))
    draw_throughput(
        path,
        panels,
        f"{setup.spec.n_layers} layers of {MODEL} in {BITS} bits, simulated; decoding, batch 1",
        f"Routing: {setup.name}, {setup.rows():,} rows; granularity "
        f"{setup.conditions.granularity}; budgets in whole experts. Quality is not simulated: up "
        "(dashed) leaves out half of every expert,\ncrisp parts of rarer pairs. Dotted: what no "
        "cache of full experts can be faster than, by Belady's loads or by computing alone.",
    )


def _bound(runs: Sequence[Run]) -> Line:
    """Return the line that no cache of full experts can be above, with or without prefetching."""
    from crisp.report.plots import Line

    lru_runs = [run for run in runs if run.settings["policy"]["name"] == "lru"]
    names = ("belady_bound_ms_per_token", "compute_bound_ms_per_token")
    least = [max(run.metrics[name] or 0 for name in names) for run in lru_runs]
    shares = [float(run.settings["budget"]["share"]) for run in lru_runs]
    return Line("bound,\nfull experts", shares, [1e3 / ms for ms in least], ":")


def _draw_token(setup: Setup, path: Path) -> None:
    """Draw one token under two policies: one whose time is near the median of both."""
    from crisp.report.plots import draw_gantt
    from crisp.run.sinks import FullTimeline
    from crisp.run.timeline import STEP
    from crisp.sim.simulate import simulate

    assert setup.hardware is not None
    rows = min(_DRAWN_ROWS, setup.rows())
    timelines: dict[str, Rows] = {}
    for name in _DRAWN:
        sink = FullTimeline()
        case = setup.case(_policy(setup, name), _DRAWN_AT, limit=rows)
        simulate(case, setup.hardware, sinks=[sink])
        timelines[name] = sink.rows
    step = typical_step(list(timelines.values()), _SETTLED, setup.spec.n_blocks)
    draw_gantt(
        path,
        {name: all_rows[all_rows[:, STEP] == step] for name, all_rows in timelines.items()},
        setup.spec.n_blocks,
        f"Token {step + 1} at a budget of {_DRAWN_AT.replace('%', ' %')}, {setup.machine}, "
        f"{setup.spec.n_layers} layers of {MODEL} in {BITS} bits, simulated",
        f"Picked: after the first {_SETTLED} tokens, the first that loads a part of an expert and "
        f"whose times differ from the medians of both by at most {100 * _NEAR_ENOUGH:.0f} % in "
        f"all;\nif there is none, the nearest. Granularity {setup.conditions.granularity}. "
        f"{_DRAWN[1]} leaves out parts of experts.",
    )


def typical_step(timelines: Sequence[Rows], settled: int, n_blocks: int) -> int:
    """Return a step whose time is near the median of all timelines, after ``settled`` steps.

    Of those near enough the first that loads a part of an expert, as that is to be seen.
    """
    import numpy as np

    from crisp.run.timeline import BLOCKS, END, KIND, LOAD, STEP

    steps = 1 + min(int(rows[-1, STEP]) for rows in timelines)
    far = np.zeros(steps)
    partial: set[int] = set()
    for rows in timelines:
        last = np.flatnonzero(np.append(np.diff(rows[:, STEP]) > 0, True))
        took = np.diff(rows[last, END], prepend=0)
        far += np.abs(took / np.median(took) - 1)
        loads = rows[(rows[:, KIND] == LOAD) & (rows[:, BLOCKS] < n_blocks)]
        partial.update(loads[:, STEP].tolist())
    far[: min(settled, steps - 1)] = np.inf
    near = np.flatnonzero(far <= max(far.min(), _NEAR_ENOUGH))
    return next((step for step in near.tolist() if step in partial), int(np.argmin(far)))


def _next(out: Path, run: int) -> list[str]:
    crisp = "crisp"
    if Path(sys.argv[0]).name == "__main__.py":
        crisp = "python -m crisp"
    elif shutil.which("crisp") is None:
        crisp = shlex.quote(sys.argv[0])
    runs = shlex.quote(str(out / "runs.json"))
    return [
        f"wrote {out / 'throughput.png'}, {out / 'token.png'}, {out / 'runs.json'}; to go on:",
        f"  {crisp} explain {runs} --run {run}",
        f"  {crisp} simulate tiny-mixtral-docs --model {MODEL} --policy lru,crisp --budget 10%,4GB",
        f"  {crisp} trace info {TRACE}",
    ]


def _say(lines: list[str]) -> None:
    print("\n".join(lines), flush=True)
