"""``crisp doctor``: what this machine offers, and what can be done about what it lacks."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crisp.cli.options import flags
from crisp.cli.output.diagnoses import Diagnosis, format_diagnoses

if TYPE_CHECKING:
    from crisp.hardware.energy import Probe

EXTRAS = {  # module -> package, of each extra in pyproject.toml
    "hf": {
        "torch": "torch",
        "transformers": "transformers",
        "tokenizers": "tokenizers",
        "xxhash": "xxhash",
        "sentencepiece": "sentencepiece",
        "google.protobuf": "protobuf",
    },
    "gguf": {"gguf": "gguf"},
    "eval": {"lm_eval": "lm-eval", "accelerate": "accelerate"},
    "gpu": {
        "torch": "torch",
        "triton": "triton",
        "pynvml": "nvidia-ml-py",
        "xxhash": "xxhash",
    },
    "jetson": {"jtop": "jetson-stats"},
}
_DOES = {  # each device of crisp.hw.devices.options.DEVICES
    "cpu": "experts from disk into memory",
    "cuda": "experts from memory to a GPU",
    "unified": "experts in memory that a GPU shares",
}
_BUILDS = {  # what each needs, where it is not there
    "cpu": "pip install '.[hf]' in the checkout",
    "cuda": "pip install '.[gpu]' in the checkout",
    "unified": "a Jetson needs builds of its own: docs/jetson-orin.md",
}


def doctor(
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where a store would be: its disk.")
    ] = Path(),
    store: Annotated[
        Path | None,
        typer.Option(metavar="STORE", help="Read this store, in place of a temporary file."),
    ] = None,
    json: Annotated[str | None, flags.file("The same, as JSON")] = None,
) -> None:
    """Say what this machine offers, and how to get what it lacks."""
    import sys
    from json import dumps

    from crisp.cli.options.files import STDOUT, check_outputs
    from crisp.cli.output.progress import progress_share
    from crisp.errors import CrispError
    from crisp.files import atomic
    from crisp.hw.store.reader import Store

    check_outputs({"--json": json}, [("--store", store)])
    if not folder.is_dir():
        raise CrispError(f"--dir {folder}: is no folder")
    first = None if store is None else Store.open(store).files[0]
    with progress_share("reading") as update:
        diagnoses = list(findings(folder if first is None else first.parent, first, update))
    people = sys.stderr if json == STDOUT else sys.stdout
    print("\n".join(format_diagnoses(diagnoses)), file=people)
    if json is not None:
        text = dumps([finding.to_dict() for finding in diagnoses], indent=1) + "\n"
        if json == STDOUT:
            sys.stdout.write(text)
        else:
            with atomic(json) as temporary:
                temporary.write_text(text, encoding="utf-8")


def findings(
    folder: Path, file: Path | None, progress: Callable[[float], None]
) -> Iterator[Diagnosis]:
    """Yield all diagnoses; file: is read, None: a temporary one in ``folder`` is."""
    from crisp.cli.output.gpus import gpus
    from crisp.hw.telemetry import meters

    yield Diagnosis("python", True, f"{platform.python_version()}, {platform.system()}")
    yield _processor()
    yield _memory()
    seen = gpus() if find_spec("torch") is not None else []
    yield from seen
    probes = {meter.name: meter.probe() for meter in meters()}  # once: a mute one takes its time
    yield from _devices(any(one.ok for one in seen), probes)
    yield _direct(folder)
    yield _early(folder)
    yield _reading(folder, file, progress)
    yield from _meters(probes)
    yield from _extras()


def _processor() -> Diagnosis:
    from crisp.hw.calibration.tables import processor_name

    usable = len(os.sched_getaffinity(0))
    return Diagnosis(
        "cpu",
        True,
        f"{processor_name()}, {usable} of {os.cpu_count()} cores may be used, so many threads "
        "compute: a core more reads weights faster, or waits",
        values={"cores": usable},
    )


def _memory() -> Diagnosis:
    from crisp.hw.memory import available_bytes, group_limit
    from crisp.units import format_bytes

    free, limit = available_bytes(), group_limit()
    values = {"available_bytes": free, "limit_bytes": limit}
    if free is None:
        why = "nobody says how much can be had (no /proc/meminfo)"
        return Diagnosis("memory", False, why, "leave room for everything else by hand", values)
    group = "no limit of its memory group"
    if limit is not None:
        group = f"its memory group may have {format_bytes(limit)}"
    return Diagnosis("memory", True, f"{format_bytes(free)} can be had; {group}", values=values)


def _devices(gpu: bool, probes: Mapping[str, Probe]) -> Iterator[Diagnosis]:
    """Yield what each device needs, and which meter its joules come from; gpu: there is one."""
    from crisp.hw.devices.options import DEVICES
    from crisp.hw.telemetry import meter_for

    for name in DEVICES:
        missing = [
            module
            for module in (("torch",) if name == "cpu" else ("torch", "triton"))
            if find_spec(module) is None
        ]
        needs = [*missing, *(["a GPU"] if name != "cpu" and not gpu else [])]
        meter = meter_for(name)
        probe = probes.get(meter.name) or meter.probe()
        dark = "" if probe.reason is None else ", which cannot be read"
        description = f"{_DOES[name]}; joules by {meter.name}{dark}"
        remedy = None
        if needs:
            description = f"needs {' and '.join(needs)}"
            remedy = _BUILDS[name] if missing else "torch must see it: see gpu"
        yield Diagnosis(f"device {name}", not needs, description, remedy, {"meter": meter.name})


def _direct(folder: Path) -> Diagnosis:
    from crisp.hw.store.disk import why_not_direct

    values: dict[str, Any] = {"folder": str(folder.resolve())}
    try:
        why = why_not_direct(folder)
    except OSError as error:
        return _no_file("O_DIRECT", folder, error, values)
    if why is None:
        return Diagnosis("O_DIRECT", True, f"works in {folder.resolve()}", values=values)
    remedy = "--dir on a disk with ext4 or xfs, say; elsewhere reads pass through the page cache"
    return Diagnosis("O_DIRECT", False, f"{folder.resolve()}: {why}", remedy, values)


def _early(folder: Path) -> Diagnosis:
    """Find out whether reads begin before the reading thread is at them."""
    from crisp.hw.store.disk import supports_async_reads

    what, place = "asynchronous reads", folder.resolve()
    try:
        works = supports_async_reads(folder)
    except OSError as error:
        return _no_file(what, folder, error, {})
    if works:
        return Diagnosis(what, True, f"begin in {place} where they are decided on")
    remedy = "O_DIRECT must work, io_setup and io_submit be allowed, fs.aio-max-nr not be used up"
    return Diagnosis(what, False, f"{place}: not to be had; the reading thread begins them", remedy)


def _reading(folder: Path, file: Path | None, progress: Callable[[float], None]) -> Diagnosis:
    from contextlib import nullcontext

    from crisp.hw.store.disk import FILE_BYTES, read_speed, temporary_file
    from crisp.hw.store.file_system import memory_file_system
    from crisp.units import format_bytes

    source: AbstractContextManager[Path] = nullcontext(file) if file else temporary_file(
        folder, FILE_BYTES, lambda share: progress(share / 2)
    )  # fmt: skip
    try:
        with source as path:
            speed = read_speed(path, progress=lambda share: progress((1 + share) / 2))
    except OSError as error:
        return _no_file("read speed", folder, error, {"bytes_per_second": None})
    how = "by O_DIRECT" if speed.direct else "through the page cache"
    memory = memory_file_system(folder if file is None else file)
    if memory is not None:
        how = f"of memory ({memory}), not of a disk"
    what = file or f"a temporary file of {format_bytes(FILE_BYTES)}"
    return Diagnosis(
        "read speed",
        memory is None,
        f"{format_bytes(speed.bytes_per_second)}/s {how}, {format_bytes(speed.read_bytes)} at a "
        f"time, from {what}",
        None if memory is None else "--dir or --store on a disk",
        values={
            "bytes_per_second": round(speed.bytes_per_second),
            "read_bytes": speed.read_bytes,
            "direct": speed.direct,
            "memory_file_system": memory,
        },
    )


def _no_file(what: str, folder: Path, error: OSError, values: dict[str, Any]) -> Diagnosis:
    remedy = "--dir with a folder that may be written and has 300 MB to spare"
    return Diagnosis(what, False, f"{folder.resolve()}: {error.strerror or error}", remedy, values)


def _meters(probes: Mapping[str, Probe]) -> Iterator[Diagnosis]:
    for name, probe in probes.items():
        description = probe.reason or f"readable: {probe.source}"
        yield Diagnosis(f"meter {name}", probe.reason is None, description, probe.remedy)


def _extras() -> Iterator[Diagnosis]:
    for extra, modules in EXTRAS.items():
        missing = [package for module, package in modules.items() if not _installed(module)]
        installed = [
            f"{package} {_version(package)}"
            for package in modules.values()
            if package not in missing
        ]
        description = "; ".join(
            [
                *([", ".join(installed)] if installed else []),
                *(f"{name} is missing" for name in missing),
            ]
        )
        remedy = _install(extra) if missing else None
        yield Diagnosis(f"extra {extra}", not missing, description, remedy, {"missing": missing})


def _installed(module: str) -> bool:
    """Return whether a module is there, without importing it."""
    around = module.rpartition(".")[0]
    return (not around or _installed(around)) and find_spec(module) is not None


def _install(extra: str) -> str:
    return f"pip install '.[{extra}]' in the checkout"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # importable, but installed by hand
        return "of unknown version"
