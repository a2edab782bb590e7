"""The working folder of a preparation: what its stages save, and the time they took."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from crisp.errors import CrispError
from crisp.files import atomic


class PreparationFolder:
    """The folder ``OUT.partial`` beside the result ``OUT``; it is removed when that is complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._times = folder / "seconds.json"
        self.seconds: dict[str, float] = {}  # by stage
        if self._times.exists():
            self.seconds = json.loads(self._times.read_text())

    @classmethod
    @contextmanager
    def open(cls, out: Path, request: str) -> Iterator[PreparationFolder]:
        """Open the folder for the result ``out``, new or with what the same request has left.

        request: a digest, see `request_digest`. Raises CrispError if the folder is of something
        else, and while another process works there.
        """
        folder = partial_folder(out)
        label = folder / "request"
        if folder.is_symlink() or (folder.exists() and not _left_by_preparation(folder)):
            raise CrispError(f"{folder}: is in the way, and was not left by a preparation")
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise CrispError(f"{folder}: another process is preparing there") from error
            labelled = label.read_bytes() if label.exists() else None
            if labelled not in (None, request.encode()):
                if any(folder.rglob("*.np*")) or (folder / "model").exists():
                    raise CrispError(
                        f"{folder}: holds a preparation begun with other options, text or "
                        "weights; repeat that command or remove the folder"
                    )
                for name in ("spill", "plain", "plain.part"):
                    shutil.rmtree(folder / name, ignore_errors=True)
                (folder / "seconds.json").unlink(missing_ok=True)
            with atomic(label) as temporary:
                temporary.write_text(request)
            yield cls(folder)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the duration of the block to the stage's time, also if it ends early."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0) + time.monotonic() - begin
            with atomic(self._times) as temporary:
                temporary.write_text(json.dumps(self.seconds))

    def finish(self, result: Path, out: Path) -> None:
        """Rename the complete ``result`` to ``out`` and remove the working folder."""
        result.replace(out.resolve())
        shutil.rmtree(self.folder)


def partial_folder(out: Path) -> Path:
    """Return the working folder of ``out``."""
    return out.resolve().with_name(out.resolve().name + ".partial")


def was_finished(out: Path, request: str) -> bool:
    """Return whether ``out`` is this request's result; a working folder left over is removed."""
    folder = partial_folder(out)
    label = folder / "request"
    if (folder / "model").exists() or not label.is_file() or label.read_bytes() != request.encode():
        return False
    if not out.is_dir() or not any(out.iterdir()):
        return False
    shutil.rmtree(folder)
    return True


def _left_by_preparation(folder: Path) -> bool:
    """Return whether a preparation made the folder: it is labelled, or so new that it is empty."""
    if (folder / "request").is_file():
        return True
    return folder.is_dir() and all(
        path.name == "lock" or path.name.startswith(".request.") for path in folder.iterdir()
    )


def check_place(out: Path, source: Path) -> None:
    """Raise CrispError unless ``out`` can be created: its parent exists and is not the model."""
    try:
        str(out).encode()
        place = out.resolve()
    except UnicodeEncodeError as error:
        raise CrispError(f"--out {str(out)!r}: is no name in UTF-8") from error
    except (OSError, RuntimeError) as error:  # a link to itself
        raise CrispError(f"--out {out}: cannot be followed: {error}") from error
    if place == source.resolve() or source.resolve() in place.parents:
        raise CrispError(f"--out {out}: is inside the model {source}; another place was expected")
    if not place.parent.is_dir():
        raise CrispError(f"--out {out}: the folder {place.parent} does not exist")


def request_digest(source: Path, texts: Sequence[Path], options: Sequence[object]) -> str:
    """Hash what decides a result: options, and texts and weights by name, size and time."""
    files = [*sorted(source.glob("*.safetensors")), source / "config.json", *texts]
    content = [str(source.resolve()), *map(_stamp, files), *map(str, options)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _stamp(path: Path) -> tuple[str, int, int]:
    """Return name, size in bytes and time in ns of a file; CrispError if it cannot be read."""
    try:
        stat = path.stat()
    except OSError as error:
        raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns
