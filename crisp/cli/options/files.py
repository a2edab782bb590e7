"""Files that a command is asked to write: refused before the work, not after it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from crisp.errors import CrispError
from crisp.files import check_writable

STDOUT = "-"
_WEIGHTS = ".safetensors"
Name = str | Path | None


def check_outputs(
    outputs: Mapping[str, Name],
    inputs: Iterable[tuple[str, Name]],
    *,
    stdout: bool = True,
) -> None:
    """Raise CrispError for what could not be written after the work, or would destroy something.

    outputs: option -> file. It must not be another output, by whatever spelling or link, nor an
    input. inputs: (option or argument, file or folder); what is not there, such as a name on the
    hub, cannot be destroyed. Into a folder that is read new files may go, but no safetensors, which
    its readers would take for weights, and none of its files may be replaced. stdout: whether -
    stands for standard output. A name is best passed as it was spelled: a Path has forgotten the
    slash that ends ``x.json/``.
    """
    read = [(what, Path(name)) for what, name in inputs if name is not None and Path(name).exists()]
    written: dict[Path, str] = {}
    for option, name in outputs.items():
        if name is None:
            continue
        to_stdout = name == STDOUT
        if to_stdout and not stdout:
            raise CrispError(f"{option} {name}: a file name was expected")
        place = Path(STDOUT if to_stdout else os.path.realpath(name))
        if place in written:
            raise CrispError(f"{option}: {written[place]} goes to {name} already")
        written[place] = option
        if to_stdout:
            continue
        try:
            check_writable(name)
        except CrispError as error:
            raise CrispError(f"{option} {error}") from error
        for what, folder in read:
            if place.suffix == _WEIGHTS and folder.is_dir() and place.parent.samefile(folder):
                raise CrispError(
                    f"{option} {name}: would be taken for weights in {what} {folder}; another "
                    "folder was expected"
                )
        if place.exists():
            _check_kept(f"{option} {name}", place, read)


def check_no_folder(option: str, path: str | Path | None) -> None:
    """Raise CrispError for a folder where a file was to be read."""
    if path is not None and Path(path).is_dir():
        raise CrispError(f"{option} {path}: is a folder; a file was expected")


def _check_kept(output: str, place: Path, read: Iterable[tuple[str, Path]]) -> None:
    """Raise CrispError if the file at ``place`` is needed: it is read, or printed to."""
    for what, path in read:
        if path.is_dir():
            if _belongs(place, path):
                raise CrispError(f"{output}: would replace a file of {what} {path}, which is read")
        elif place.samefile(path):
            raise CrispError(f"{output}: would replace {what} {path}, which is read")
    for number, stream in ((1, "output"), (2, "error")):
        if os.path.samestat(place.stat(), os.fstat(number)):
            raise CrispError(f"{output}: would replace the file that standard {stream} goes to")


def _belongs(file: Path, folder: Path) -> bool:
    """Return whether an existing file lies in a folder, or a file of the folder is a link to it."""
    inside = file.is_relative_to(folder.resolve())
    return inside or any(file.samefile(entry) for entry in folder.iterdir() if entry.is_file())
