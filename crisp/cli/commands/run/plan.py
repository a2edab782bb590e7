"""``crisp plan``: how much memory a model's experts may have here, and what more would buy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crisp.cli.options import flags

if TYPE_CHECKING:
    from crisp.hw.budget import MemoryPlan
    from crisp.model.spec import ModelSpec
    from crisp.policy import Budget

_STEP = 4  # a larger step is one more fourth of the experts
_ROWS = 500  # of a trace, simulated for each row of the table


def plan(
    model: Annotated[Path, typer.Argument(help="A folder with a transformers checkpoint.")],
    store: flags.StoreFolder,
    policy: Annotated[str, typer.Option(help=flags.POLICIES)] = "lru",
    hardware: Annotated[
        str | None, typer.Option(help="A machine's profile, for tokens/s; with --trace.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="TRACE", help="A routing trace to simulate.")
    ] = None,
    metadata: flags.MetadataFile = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the longest prompt.")] = 512,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 128,
    chunk: flags.Chunk = "512",
    threads: flags.Threads = None,
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Memory that the run may have, such as 4GB.  [default: this machine's]",
        ),
    ] = None,
    json: Annotated[str | None, flags.file("The same, as JSON")] = None,
    plugin: flags.Plugin = None,
) -> None:
    """Say which budget is safe on this machine, and what more memory would buy.

    Nothing is loaded: what libraries take is as docs/device.md has it.
    """
    import sys
    from json import dumps

    from crisp.cli.options.devices import open_store
    from crisp.cli.options.files import STDOUT, check_no_folder, check_outputs
    from crisp.cli.output.words import printable
    from crisp.errors import CrispError
    from crisp.files import atomic
    from crisp.hw.budget import largest_budget, plan_memory
    from crisp.hw.devices.options import DeviceOptions
    from crisp.hw.memory import MemoryLimit
    from crisp.hw.model.memory import foreseen_needs
    from crisp.hw.model.resident import same_geometry
    from crisp.policy import named
    from crisp.run.case import parse_chunk
    from crisp.units import parse_bytes

    inputs = [("MODEL", model), ("--store", store), ("--metadata", metadata)]
    check_outputs({"--json": json}, inputs)
    check_no_folder("--metadata", metadata)
    for flag, value in (("--prompt-tokens", prompt_tokens), ("--max-new-tokens", max_new_tokens)):
        if value < 1:
            raise CrispError(f"{flag} {value}: expected 1 or more")
    computing = DeviceOptions(threads=threads).computing
    given = None
    if limit is not None:
        given = [MemoryLimit(f"--limit {limit}", parse_bytes(limit, "--limit"), 0)]
    opened, chosen = open_store(store), named(policy)
    same_geometry(model, opened)
    rows = parse_chunk(chunk)
    needs = foreseen_needs(model, opened, chosen, prompt_tokens, max_new_tokens, rows, computing)
    memory = plan_memory(needs, given)
    budget = largest_budget(opened.spec, chosen.cache, memory)
    budgets = _steps(opened.spec, budget)
    speeds, why = _speeds(str(store), policy, hardware, trace, metadata, budgets, memory, budget)
    result = _result(opened.spec, memory, budgets, budget, speeds, why)
    lines = [*_memory_lines(memory), "", *_step_lines(result)]
    people = sys.stderr if json == STDOUT else sys.stdout
    print("\n".join(map(printable, lines)), file=people)
    text = dumps(result, indent=1) + "\n"
    if json == STDOUT:
        sys.stdout.write(text)
    elif json is not None:
        with atomic(json) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _steps(spec: ModelSpec, budget: Budget) -> list[Budget]:
    """Return half the budget, the budget, and larger ones up to all experts."""
    from crisp.policy import Budget

    chosen, whole = budget.n_bytes or 0, spec.routed_bytes
    sizes = [chosen // 2, chosen]
    while sizes[-1] < whole:
        sizes.append(min(whole, sizes[-1] + -(-whole // _STEP)))
    return [Budget(f"{size}B", None, size) for size in sizes if size]


def _speeds(
    store: str,
    policy: str,
    hardware: str | None,
    trace: str | None,
    metadata: Path | None,
    budgets: list[Budget],
    memory: MemoryPlan,
    chosen: Budget,
) -> tuple[list[float | None], str | None]:
    """Return the simulated tokens/s of each budget; or None each, and why.

    A profile with a page cache has what the limit leaves beside the budget.
    """
    from crisp.cli.output.progress import progress
    from crisp.profile.metadata import Metadata
    from crisp.run.case import Conditions
    from crisp.run.setup import load_setup
    from crisp.sim.experiment import AUTO, run_case
    from crisp.sim.hardware import hardware_profile
    from crisp.trace.bundled import resolve_trace

    machine = None if hardware is None else hardware_profile(hardware)
    if trace is not None:
        resolve_trace(trace)
    if metadata is not None:
        Metadata.load(metadata)
    if machine is None or trace is None:
        missing = "--hardware PROFILE" if machine is None else "--trace TRACE"
        return [None] * len(budgets), f"give {missing}" + (
            " and --trace TRACE" if machine is None and trace is None else ""
        )
    setup = load_setup(
        trace,
        model=store,
        hardware=machine,
        conditions=Conditions(limit=_ROWS),
        metadata=metadata,
    )
    speeds: list[float | None] = []
    reserve = dict(memory.parts)["reserve"]
    with progress("budgets", len(budgets)) as advance:
        for budget in budgets:
            unused = max(0, (chosen.n_bytes or 0) - (budget.n_bytes or 0))
            one = machine
            if machine.has_page_cache:
                one = machine.with_page_cache(reserve + unused)
            metrics = run_case(setup.case(policy, budget), one, AUTO).metrics
            speeds.append(metrics["tokens_per_second"])
            advance(1)
    return speeds, None


def _result(
    spec: ModelSpec,
    memory: MemoryPlan,
    budgets: list[Budget],
    chosen: Budget,
    speeds: list[float | None],
    why: str | None,
) -> dict[str, Any]:
    """Return the plan, safe for JSON."""
    base = sum(size for _, size in memory.parts)
    steps = [
        {
            "budget_bytes": budget.n_bytes,
            "share": (budget.n_bytes or 0) / spec.routed_bytes,
            "memory_bytes": base + (budget.n_bytes or 0),
            "tokens_per_second": speed,
            "chosen": budget == chosen,
        }
        for budget, speed in zip(budgets, speeds, strict=True)
    ]
    return {
        "limit": {"what": memory.limit.what, "bytes": memory.limit.n_bytes},
        "parts": dict(memory.parts),
        "budget_bytes": chosen.n_bytes,
        "steps": steps,
        "why_no_speed": why,
    }


def _memory_lines(memory: MemoryPlan) -> list[str]:
    """Return what takes what of the limit."""
    from crisp.cli.output.columns import align_columns
    from crisp.units import format_bytes

    what = [memory.limit.what, *(f"- {name}" for name, _ in memory.parts), "= for experts"]
    sizes = [memory.limit.n_bytes, *(size for _, size in memory.parts), memory.room]
    return align_columns(["memory", "bytes"], [what, [format_bytes(size) for size in sizes]], 1)


def _step_lines(result: dict[str, Any]) -> list[str]:
    """Return the table of budgets, and what is to be said of it."""
    from crisp.cli.output.columns import align_columns, format_numbers
    from crisp.units import format_bytes

    steps = result["steps"]
    speeds = [step["tokens_per_second"] for step in steps]
    columns = [
        ["auto" if step["chosen"] else "" for step in steps],
        [format_bytes(step["budget_bytes"]) for step in steps],
        [f"{100 * step['share']:.0f}" for step in steps],
        [format_bytes(step["memory_bytes"]) for step in steps],
        format_numbers(speeds),
    ]
    lines = align_columns(["", "budget", "experts %", "memory", "tokens/s"], columns, 1)
    if result["why_no_speed"] is not None:
        lines.append(f"tokens/s –: {result['why_no_speed']}")
    chosen = next(step for step in steps if step["chosen"])
    first = steps[0]
    slower = None not in speeds and first["tokens_per_second"] > chosen["tokens_per_second"]
    if slower:
        lines.append(f"note: less is faster here; give --budget {first['budget_bytes']}B")
    return lines
