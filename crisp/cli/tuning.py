"""Every measured width at a budget: what is tried, what of it is worth it, and how that is told."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from crisp.cli.cells import AUTO, Cell, opened, run_cell
from crisp.cli.output.columns import aligned, numbers
from crisp.cli.output.progress import progress
from crisp.cli.setup import Setup
from crisp.errors import CrispError
from crisp.policy import Budget, named
from crisp.policy.widths.names import WIDTHS
from crisp.run.result import Run
from crisp.sim.sweep.parallel import cores, side_by_side
from crisp.sim.tuning.losses import Loss, Losses, front, same_budget

METRICS = {
    "bytes": "bytes_per_token",
    "energy": "energy_j_per_token",
    "time": "ms_per_token_mean",
}
# Tried for widths that do not look at what is resident: their loss is the same with all of them.
CACHES = (("lru", "expert"), ("lfu", "expert"), ("lru", "block"), ("suffix-lru", "block"))
ORDERS = ("widest", "johnson")  # johnson where time counts: bytes hardly depend on the order
_COLUMNS = (
    ("MB/token", "bytes_per_token", 1e-6),
    ("J/token", "energy_j_per_token", 1.0),
    ("ms/token", "ms_per_token_mean", 1.0),
)
_WIDTH = 100


@dataclass(frozen=True)
class Point:
    """A policy at the budget: what its widths lose, and its run."""

    loss: Loss
    cell: Cell
    run: Run


@dataclass(frozen=True)
class Tuned:
    """What no other policy beats, by rising loss, and what has to be said about it."""

    front: list[Point]
    reference: Point  # the least of full widths
    tried: int
    notes: list[str]

    def best(self, most: float) -> Point:
        """The last one on the front that loses no more than ``most``."""
        return [point for point in self.front if point.loss.loss <= most][-1]


def tuned(setup: Setup, losses: Losses, file: str, budget: str, minimise: str) -> Tuned:
    """Simulate all that the losses allow; CrispError where nothing can be minimised.

    file: where the losses come from.
    """
    hardware, cost = setup.hardware, _cost(METRICS[minimise])
    if minimise == "energy" and (hardware is None or hardware.power is None):
        raise CrispError(f"--minimise energy: {setup.machine} has no power figures")
    cells, elsewhere, refused = _cells(setup, losses, budget, minimise)
    points: list[Point] = []
    with (
        progress("policies", len(cells)) as advance,
        side_by_side(_tried, enumerate(cells), jobs=min(len(cells), cores())) as finished,
    ):
        runs = {}
        for place, run in finished:
            runs[place] = run
            advance(1)
    for place, (loss, cell) in enumerate(cells):
        run = runs[place]
        if isinstance(run, Run):
            points.append(Point(loss, cell, run))
        else:
            refused.append(f"{loss.width}: {run}")
    full = [point for point in points if point.loss.width == "full"]
    if not full:
        raise CrispError(refused[0])
    notes = _lacks(losses, elsewhere, file, budget)
    if refused:
        notes.append(f"refused: {len(refused)}, such as {refused[0]}")
    found = front(points, lambda point: point.loss.loss, cost)
    return Tuned(found, min(full, key=cost), len(points), notes)


def _cost(metric: str) -> Callable[[Point], float]:
    return lambda point: point.run.metrics[metric] or 0.0


def _cells(
    setup: Setup, losses: Losses, budget: str, minimise: str
) -> tuple[list[tuple[Loss, Cell]], list[Loss], list[str]]:
    """(what is tried, losses that hold at another budget only, reasons why some cannot be used)."""
    asked, orders = Budget.parse(budget), ORDERS if minimise == "time" else ORDERS[:1]
    cells: list[tuple[Loss, Cell]] = []
    elsewhere, refused = list[Loss](), list[str]()
    for loss in {_same(loss): loss for loss in losses.rows}.values():
        try:
            resident = _resident(setup, loss)
        except CrispError as error:
            refused.append(f"{loss.width}: {error}")
            continue
        if resident and not same_budget(budget, loss.budget):
            elsewhere.append(loss)
            continue
        caches = [(loss.cache, loss.unit)] if resident else CACHES
        for cache, unit in caches:
            for order in orders:
                policy = named(
                    loss.policy, width=loss.width, order=order, cache=cache, scope=loss.scope,
                    unit=unit, prefetch="none",
                )  # fmt: skip
                cells.append((loss, setup.cell(policy, asked, AUTO)))
    return cells, elsewhere, refused


def _same(loss: Loss) -> tuple[object, ...]:
    """What two measurements share that need be tried once."""
    return loss.width, loss.cache, loss.scope, loss.unit, loss.budget


def _resident(setup: Setup, loss: Loss) -> bool:
    """Whether the widths look at what is resident: then their loss holds for one cache only."""
    routing = setup.routing
    width = named(loss.policy, width=loss.width, prefetch="none").width
    bound = width.bind(setup.spec, routing.profile, routing.simulated.header.ordered)
    return bound.residency


def _tried(item: tuple[int, tuple[Loss, Cell]]) -> tuple[int, Run | str]:
    """The run in a worker, or why there is none."""
    place, (_, cell) = item
    try:
        return place, run_cell(cell, opened(cell.source))
    except CrispError as error:
        return place, str(error)


def report(found: Tuned, most: str, limit: float, minimise: str) -> list[str]:
    """The front, the best of it, and what has to be said below."""
    best, metric = found.best(limit), METRICS[minimise]
    full = _cost(metric)(found.reference)
    points = found.front
    policies = [point.run.settings["policy"] for point in points]
    cells = [
        ["*" if point is best else "" for point in points],
        *(
            [str(policy[part]) for policy in policies]
            for part in ("name", "width", "cache", "unit", "order")
        ),
        numbers([100 * point.loss.loss for point in points], 1),
        [_range(point.loss) for point in points],
    ]
    for _, name, factor in _COLUMNS:
        values = [point.run.metrics[name] for point in points]
        cells.append(numbers([None if v is None else v * factor for v in values]))
    shares = [100 * _cost(metric)(point) / full if full else None for point in points]
    cells.append(numbers(shares, 1))
    headings = ["", "policy", "width", "cache", "unit", "order", "loss %", "range"]
    headings += [heading for heading, _, _ in _COLUMNS]
    notes = [
        f"*: the least {minimise} a token within a loss of {most}; of {found.tried} policies tried "
        "none beats those above",
        f"loss: increase of perplexity, measured; of full: of the {minimise} of full widths "
        "at their best",
    ]
    if best.loss.interval is not None and best.loss.interval[1] > limit:
        notes.append(f"*: its loss may be above {most}: the range, 95 %, goes beyond")
    notes += found.notes
    return [
        *aligned([*headings, "of full %"], cells, text=6),
        "",
        *(line for note in notes for line in _wrapped(note)),
    ]


def _wrapped(note: str) -> list[str]:
    return wrap(note, _WIDTH, subsequent_indent=" " * 8, break_on_hyphens=False)


def command_line(point: Point, trace: str, budget: str, given: Mapping[str, object]) -> str:
    """The command that runs it. given: the other options, None where they were not given."""
    policy = point.run.settings["policy"]
    told: dict[str, object] = {"--policy": policy["name"], "--budget": budget}
    told |= {
        f"--{part}": policy[part]
        for part in ("width", "order", "cache", "scope", "unit", "prefetch")
    }
    words = [
        str(word)
        for pair in (*told.items(), *given.items())
        if pair[1] is not None
        for word in pair
    ]
    return shlex.join(["crisp", "simulate", trace, *words])


def _range(loss: Loss) -> str:
    if loss.interval is None:
        return ""
    low, high = (100 * end for end in loss.interval)
    return f"{low:.1f} to {high:.1f}"


def _lacks(losses: Losses, elsewhere: Sequence[Loss], file: str, budget: str) -> list[str]:
    """What is not in the file, a line each."""
    notes = []
    if elsewhere:
        at = ", ".join(sorted({loss.budget or "none" for loss in elsewhere}))
        names = ", ".join(dict.fromkeys(loss.width for loss in elsewhere))
        notes.append(
            f"{file}: not usable at {budget}: {names}, which look at what is resident and were "
            f"measured at a budget of {at}; crisp eval --budget {budget} measures them"
        )
    there = {loss.width.partition("(")[0] for loss in losses.rows}
    missing = [name for name in WIDTHS if name not in there]
    if missing:
        notes.append(f"{file}: has no {', '.join(missing)}; crisp eval --width measures them")
    return notes
