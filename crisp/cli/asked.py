"""What a cell of a sweep asks for, as what is run: checked, opened, run, and told as a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from crisp.cli.cells import AUTO, Cell, opened, run_cell
from crisp.cli.setup import Setup, prepare
from crisp.errors import CrispError, nearest
from crisp.model.spec import ModelSpec
from crisp.policy import NAMED, Budget
from crisp.policy.cache import SCOPES, UNITS
from crisp.policy.policy import read_cache, read_order
from crisp.policy.prefetch import PREFETCHERS
from crisp.policy.spelling import build
from crisp.policy.widths.names import WIDTHS
from crisp.profile.metadata import Metadata
from crisp.run.case import GRANULARITIES, Conditions
from crisp.scheduler.workload import PHASES
from crisp.sim.hardware import profile as hardware_profile
from crisp.sim.sweep.journal import Record
from crisp.sim.sweep.results import Row, flat, key_of, row_of, sequences_of
from crisp.sim.sweep.spec import KEYS, PARTS, Asked, Axis, Grid, Steps, Sweep
from crisp.trace.bundled import resolve
from crisp.units import exact

HARDWARE = "rtx4090-pcie4"  # unless told otherwise, as in simulate
NUMBERS = {"layers": 1, "block": 1, "top_k": 1, "batch": 1, "chunk": 1, "limit": 1, "seed": 0}
_DIGITS = 18  # of a whole number: what a column of results can hold
_SHOWN = 30  # characters of what is none
_TRIED = 200  # values of a spelling with {names} in it: one of them must do


@dataclass(frozen=True)
class Job:
    """A cell that is to be run, and what of it."""

    cell: str  # its key
    asked: Asked
    files: Asked  # those of its keys that name files, as any process finds them
    engine: str
    sequences: bool  # keep what each sequence took


def check(sweep: Sweep) -> None:
    """Raise CrispError, with file and key, for a value that no cell can do anything with."""
    for grid in sweep.grids:
        for axis in grid.axes:
            if axis.key in KEYS:
                for text in _spellings(axis, grid):
                    _check(axis, text)


def _spellings(axis: Axis, grid: Grid) -> list[list[str]]:
    """For each value what it stands for: itself, or what {names} in it make of it."""
    names = {own.key: own.values for own in grid.axes if own.key not in KEYS}
    if isinstance(axis.values, Steps):  # there may be millions
        return [[axis.values[0]], [axis.values[-1]]]
    found = []
    for text in axis.values:
        own = tuple(
            Axis(name, values, "") for name, values in names.items() if f"{{{name}}}" in text
        )
        inner = Grid((Axis(axis.key, [text], ""), *own))
        step = max(1, inner.count // _TRIED)
        found.append(
            [inner.at(place)[axis.key] for place in range(0, min(inner.count, step * _TRIED), step)]
        )
    return found


def _check(axis: Axis, spellings: list[str]) -> None:
    first = None
    for text in spellings:
        try:
            _READERS[axis.key](text)
            return
        except CrispError as error:
            first = first or error
    raise CrispError(f"{axis.where}: {first}") from first


def _whole(key: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        digits = text.removeprefix("-")
        if len(digits) > _DIGITS or not digits.isdecimal() or int(text) < NUMBERS[key]:
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
            raise CrispError(f"found {shown}, expected a whole number, at least {NUMBERS[key]}")
        return int(text)

    return read


def _one_of(known: tuple[str, ...] | Mapping[str, object], what: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise nearest(text, known, what)
        return text

    return read


def _bits(text: str) -> Fraction:
    bits = exact(text)
    if bits <= 0:
        raise CrispError(f"found {text}, expected bits above 0")
    return bits


_READERS: dict[str, Callable[[str], Any]] = {
    "trace": resolve,
    "profile": resolve,
    "metadata": Metadata.load,
    "model": ModelSpec.named,
    "bits": _bits,
    "hardware": hardware_profile,
    "phase": _one_of(PHASES, "phase"),
    "granularity": _one_of(GRANULARITIES, "granularity"),
    "policy": _one_of(NAMED, "policy"),
    "width": lambda text: build(text, WIDTHS, "width"),
    "order": lambda text: read_order(text, 0),
    "cache": lambda text: read_cache(text, "layer", "block", 0),
    "scope": _one_of(SCOPES, "scope"),
    "unit": _one_of(UNITS, "unit"),
    "prefetch": _one_of(PREFETCHERS, "prefetch"),
    "budget": Budget.parse,
    **{key: _whole(key) for key in NUMBERS},
}


def cell_of(asked: Asked, engine: str = AUTO) -> tuple[Setup, Cell]:
    """The cell that is asked for; CrispError where its settings do not go together."""
    setup = _setup(tuple(sorted((key, asked[key]) for key in _SETUP if key in asked)))
    parts: dict[str, Any] = {key: asked[key] for key in PARTS if key in asked}
    (policy,) = setup.policies([asked["policy"]], **parts)
    return setup, setup.cell(policy, Budget.parse(asked["budget"]), engine)


_SETUP = KEYS[: KEYS.index("policy")]
_OPENED = 8  # setups at a time


@lru_cache(maxsize=_OPENED)
def _setup(asked: tuple[tuple[str, str], ...]) -> Setup:
    given: dict[str, Any] = dict(asked)
    given |= {key: _READERS[key](given[key]) for key in NUMBERS if key in given}
    defaults = Conditions()
    conditions = {key: given.pop(key, value) for key, value in vars(defaults).items()}
    metadata = given.pop("metadata", None)
    return prepare(
        given.pop("trace"),
        model=given.pop("model", None),
        hardware=given.pop("hardware", HARDWARE),
        conditions=Conditions(**conditions),
        metadata=None if metadata is None else Path(metadata),
        opening=opened,
        **given,
    )


def forget() -> None:
    """Open everything anew: files may have changed since the last sweep of this process."""
    _setup.cache_clear()
    opened.cache_clear()
    _digest.cache_clear()


def key(asked: Asked) -> str:
    """The hash of all that decides the cell's figures, files and profiles resolved.

    Of settings that do not go together, of what was asked for.
    """
    try:
        setup, cell = cell_of(asked)
    except CrispError:
        return key_of({"refused": dict(asked)})
    return key_of(_resolved(setup, cell))


def _resolved(setup: Setup, cell: Cell) -> dict[str, Any]:
    hardware = cell.hardware
    return {
        "trace": setup.routing.file,
        "layers": cell.source.layers,
        "profile": {"sha256": _digest(setup), "from": setup.routing.how},
        "model": cell.spec.to_dict(),
        "hardware": hardware and hardware.to_dict(),
        "policy": cell.policy.to_dict(),
        "budget": cell.budget.text,
        **asdict(cell.conditions),
    }


@lru_cache(maxsize=_OPENED)
def _digest(setup: Setup) -> str:
    return setup.routing.profile.digest()


def run(job: Job) -> Record:
    """Run a cell: what is kept of it. One that is refused has the reason in its row."""
    asked = flat({"asked": {key: _number(key, text) for key, text in job.asked.items()}})
    first: Row = {"cell": job.cell, **asked, "refused": None}
    try:
        setup, cell = cell_of({**job.asked, **job.files}, job.engine)
        done = run_cell(cell, setup.routing)
        kept = sequences_of(done, cell.spec.block_bytes) if job.sequences else None
    except CrispError as error:
        return {"cell": job.cell, "row": first | {"refused": str(error)}, "sequences": None}
    return {"cell": job.cell, "row": first | row_of(done), "sequences": kept}


def job_of(cell: str, asked: Asked, engine: str, sequences: bool) -> Job:
    """A cell that is to be run; cell: its key."""
    return Job(cell, asked, files_of(asked), engine, sequences)


def files_of(asked: Asked) -> dict[str, str]:
    """The keys that name files or folders here, absolute: a worker may stand elsewhere."""
    return {
        name: str(Path(asked[name]).absolute())
        for name in ("trace", "profile", "metadata", "model", "hardware")
        if name in asked and Path(asked[name]).exists()
    }


def _number(key: str, text: str) -> str | int | float:
    """What was given for a {name}, or is a whole number, as a number, so that it can be plotted."""
    if key in KEYS and key not in NUMBERS:
        return text
    try:
        number = exact(text)
    except CrispError:
        return text
    return int(number) if number.denominator == 1 else float(number)
