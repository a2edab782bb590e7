"""One cell of a sweep: from its settings to a planned run, and from its run to a row of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from crisp.checkpoint.geometry.read import read_model
from crisp.errors import CrispError, unknown_name
from crisp.extensions import find_name
from crisp.policy import Budget, policy_name
from crisp.policy.cache import SCOPES, UNITS
from crisp.policy.magnitude import MAGNITUDES
from crisp.policy.policy import ALIASES, read_cache, read_order
from crisp.policy.prefetch import PREFETCHERS
from crisp.policy.rescaling import RESCALES
from crisp.policy.routing.rules import ROUTINGS
from crisp.policy.spelling import build
from crisp.policy.widths.names import WIDTHS
from crisp.profile.loss_curve import POLICY, parse_loss
from crisp.profile.metadata import Metadata
from crisp.run.case import GRANULARITIES, Conditions
from crisp.run.inputs import cached_inputs
from crisp.run.setup import Setup, load_setup
from crisp.scheduler.workload import PHASES, WHOLE
from crisp.sim.experiment import AUTO, PlannedRun, plan_run, run_case
from crisp.sim.hardware import hardware_profile
from crisp.sim.sweep.journal import Record
from crisp.sim.sweep.results import Row, flatten, hash_settings, run_row, sequences_of
from crisp.sim.sweep.spec import (
    BEFORE,
    KEYS,
    PARTS,
    Axis,
    CellSettings,
    Sweep,
    SweepGrid,
    ValueRange,
)
from crisp.trace.bundled import resolve_trace
from crisp.units import parse_fraction

HARDWARE = "rtx4090-pcie4"  # unless told otherwise, as in simulate
NUMBERS = {"layers": 1, "block": 1, "top_k": 1, "batch": 1, "chunk": 1, "limit": 1, "seed": 0}
_DIGITS = 18  # of a whole number: what a column of results can hold
_SHOWN = 30  # characters of what is none
_TRIED = 200  # values of a spelling with {names} in it: one of them must do
_CACHED = 8  # setups that stay loaded


@dataclass(frozen=True)
class CellJob:
    """A cell that is to be run, for whatever process runs it."""

    key: str  # of the cell
    settings: CellSettings
    files: CellSettings  # those of its keys that name files, as any process finds them
    engine: str
    sequences: bool  # keep what each sequence took


def check_values(sweep: Sweep) -> None:
    """Raise CrispError, with file and key, for a value that no cell can do anything with."""
    for grid in sweep.grids:
        for axis in grid.axes:
            if axis.key in KEYS:
                for spellings in _spellings(axis, grid):
                    _check_spellings(axis, spellings)


def check_losses(sweep: Sweep) -> list[str]:
    """Return a line for each grid some of whose policies do not look at its loss.

    Raises CrispError, with file and key, for a loss that none of a grid's policies looks at.
    """
    lines = []
    for grid in sweep.grids:
        axes = {axis.key: axis for axis in grid.axes}
        if "loss" not in axes or "policy" not in axes:
            continue
        loss, policy = axes["loss"], axes["policy"]
        names = {text for spellings in _spellings(policy, grid) for text in spellings}
        others = sorted(name for name in names if ALIASES.get(name, name) != POLICY)
        if len(others) == len(names):
            raise CrispError(f"{loss.where}: is for policy {POLICY}, which {policy.where} does not "
                             "name")  # fmt: skip
        if others:
            lines.append(f"{loss.where}: for policy {POLICY} alone, not for {', '.join(others)}")
    return lines


def _spellings(axis: Axis, grid: SweepGrid) -> list[list[str]]:
    """Return what each value stands for: itself, or what the {names} in it make of it."""
    values_of_names = {axis.key: axis.values for axis in grid.axes if axis.key not in KEYS}
    if isinstance(axis.values, ValueRange):  # there may be millions
        return [[axis.values[0]], [axis.values[-1]]]
    spellings = []
    for text in axis.values:
        used = tuple(
            Axis(name, values, "")
            for name, values in values_of_names.items()
            if f"{{{name}}}" in text
        )
        inner = SweepGrid((Axis(axis.key, [text], ""), *used))
        step = max(1, inner.count // _TRIED)
        places = range(0, min(inner.count, step * _TRIED), step)
        spellings.append([inner.at(place)[axis.key] for place in places])
    return spellings


def _check_spellings(axis: Axis, spellings: list[str]) -> None:
    """Raise CrispError unless one of the spellings of a value can be read."""
    first_error = None
    for text in spellings:
        try:
            _READERS[axis.key](text)
            return
        except CrispError as error:
            first_error = first_error or error
    raise CrispError(f"{axis.where}: {first_error}") from first_error


def _whole(key: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        digits = text.removeprefix("-")
        if len(digits) > _DIGITS or not digits.isdecimal() or int(text) < NUMBERS[key]:
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
            raise CrispError(f"found {shown}, expected a whole number, at least {NUMBERS[key]}")
        return int(text)

    return read


def _one_of(names: tuple[str, ...] | Mapping[str, object], what: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise unknown_name(text, names, what)
        return text

    return read


def _bits(text: str) -> Fraction:
    bits = parse_fraction(text)
    if bits <= 0:
        raise CrispError(f"found {text}, expected bits above 0")
    return bits


_READERS: dict[str, Callable[[str], Any]] = {
    "trace": resolve_trace,
    "profile": resolve_trace,
    "metadata": Metadata.load,
    "model": lambda text: read_model(text, Fraction(1)),  # bits are another key's
    "bits": _bits,
    "hardware": hardware_profile,
    "phase": _one_of(PHASES, "phase"),
    "granularity": _one_of(GRANULARITIES, "granularity"),
    "policy": policy_name,
    "width": lambda text: build(text, WIDTHS, "width"),
    "order": lambda text: read_order(text, 0),
    "cache": lambda text: read_cache(text, "layer", "block", 0),
    "scope": _one_of(SCOPES, "scope"),
    "unit": _one_of(UNITS, "unit"),
    "prefetch": lambda text: find_name(PREFETCHERS, text, "prefetch"),
    "rescale": _one_of(RESCALES, "rescale"),
    "magnitude": _one_of(MAGNITUDES, "magnitude"),
    "routing": lambda text: build(text, ROUTINGS, "routing"),
    "budget": Budget.parse,
    "loss": parse_loss,
    **{key: _whole(key) for key in NUMBERS},
    "chunk": lambda text: text if text == WHOLE else _whole("chunk")(text),
}


def plan_cell(settings: CellSettings, engine: str = AUTO) -> tuple[Setup, PlannedRun]:
    """Return a cell's setup and run; CrispError where its settings do not go together."""
    setup = _setup(tuple(sorted((key, settings[key]) for key in BEFORE if key in settings)))
    parts: dict[str, Any] = {key: settings[key] for key in PARTS if key in settings}
    policy = setup.policy(settings["policy"], **parts)
    return setup, plan_run(setup, policy, settings["budget"], engine)


@lru_cache(maxsize=_CACHED)
def _setup(settings: tuple[tuple[str, str], ...]) -> Setup:
    values: dict[str, Any] = dict(settings)
    values |= {key: _READERS[key](values[key]) for key in (*NUMBERS, "loss") if key in values}
    conditions = {key: values.pop(key, value) for key, value in vars(Conditions()).items()}
    metadata = values.pop("metadata", None)
    return load_setup(
        values.pop("trace"),
        hardware=hardware_profile(values.pop("hardware", HARDWARE)),
        conditions=Conditions(**conditions),
        metadata=None if metadata is None else Path(metadata),
        load=cached_inputs,
        read=read_model,
        **values,
    )


def forget_files() -> None:
    """Load everything anew: files may have changed since the last sweep of this process."""
    _setup.cache_clear()
    cached_inputs.cache_clear()
    _profile_digest.cache_clear()


def cell_key(settings: CellSettings) -> str:
    """Return the hash of all that decides a cell's figures, files and profiles resolved.

    Of settings that do not go together it is the hash of the settings.
    """
    try:
        setup, planned = plan_cell(settings)
    except CrispError:
        return hash_settings({"refused": dict(settings)})
    return hash_settings(_resolved(setup, planned))


def _resolved(setup: Setup, planned: PlannedRun) -> dict[str, Any]:
    return {
        "trace": setup.inputs.file,
        "layers": planned.source.layers,
        "profile": {"sha256": _profile_digest(setup), "from": setup.inputs.split},
        "model": planned.spec.to_dict(),
        "hardware": planned.hardware.to_dict(),
        "policy": planned.policy.to_dict(),
        "budget": planned.budget.text,
        **asdict(planned.conditions),
    }


@lru_cache(maxsize=_CACHED)
def _profile_digest(setup: Setup) -> str:
    return setup.inputs.profile.digest()


def run_cell(job: CellJob) -> Record:
    """Load and run one cell; return its result row, with the reason in it if it is refused."""
    numbers = {key: _number(key, text) for key, text in job.settings.items()}
    first: Row = {"cell": job.key, **flatten({"asked": numbers}), "refused": None}
    try:
        setup, planned = plan_cell({**job.settings, **job.files}, job.engine)
        run = run_case(planned.case(setup.inputs), planned.hardware, planned.engine)
        sequences = sequences_of(run) if job.sequences else None
    except CrispError as error:
        return {"cell": job.key, "row": first | {"refused": str(error)}, "sequences": None}
    return {"cell": job.key, "row": first | run_row(run), "sequences": sequences}


def job_of(key: str, settings: CellSettings, engine: str, sequences: bool) -> CellJob:
    """Return the job of a cell that is to be run; key: the cell's."""
    return CellJob(key, settings, files_of(settings), engine, sequences)


def files_of(settings: CellSettings) -> dict[str, str]:
    """Return the keys that name files or folders here, absolute: a worker may stand elsewhere."""
    return {
        name: str(Path(settings[name]).absolute())
        for name in ("trace", "profile", "metadata", "model", "hardware")
        if name in settings and Path(settings[name]).exists()
    }


def _number(key: str, text: str) -> str | int | float:
    """Return what was given for a {name}, or a whole number, as a number: it can be plotted."""
    if key in KEYS and key not in NUMBERS:
        return text
    try:
        number = parse_fraction(text)
    except CrispError:
        return text
    return int(number) if number.denominator == 1 else float(number)
