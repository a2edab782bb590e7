"""The folder of a preparation under way: what is kept between stages, and the time they took."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from crisp.errors import CrispError
from crisp.files import atomic


class Work:
    """``OUT.partial`` beside the result; it is gone when the result is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._times = folder / "seconds.json"
        self.seconds: dict[str, float] = {}  # by stage
        if self._times.exists():
            self.seconds = json.loads(self._times.read_text())

    @classmethod
    def open(cls, out: Path, request: str) -> Work:
        """Begin, or go on with what was begun for the same ``request`` (a digest)."""
        folder = out.resolve().with_name(out.resolve().name + ".partial")
        label = folder / "request"
        known = label.read_text() if label.exists() else None
        if known not in (None, request):
            raise CrispError(
                f"{folder}: holds a preparation begun with other options, text or weights; "
                "repeat that command or remove the folder"
            )
        folder.mkdir(exist_ok=True)
        with atomic(label) as temporary:
            temporary.write_text(request)
        return cls(folder)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add what the block takes to the stage's time, also if it ends early."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0) + time.monotonic() - begin
            with atomic(self._times) as temporary:
                temporary.write_text(json.dumps(self.seconds))

    def finish(self, made: Path, out: Path) -> None:
        """The result takes its place, at once; what was needed on the way goes."""
        made.replace(out.resolve())
        shutil.rmtree(self.folder)


def refuse_taken(out: Path) -> None:
    """Raise CrispError unless ``out`` can become a new folder."""
    if out.is_dir() and any(out.iterdir()):
        raise CrispError(f"--out {out}: is not empty; a new folder was expected")
    if out.exists() and not out.is_dir():
        raise CrispError(f"--out {out}: is a file; a new folder was expected")
    if not out.resolve().parent.is_dir():
        raise CrispError(f"--out {out}: the folder {out.resolve().parent} does not exist")


def request_digest(source: Path, texts: Sequence[Path], options: Sequence[object]) -> str:
    """Of all that decides a result: options, and texts and weights by name, size and time."""
    files = [*sorted(source.glob("*.safetensors")), source / "config.json", *texts]
    content = [str(source.resolve()), *map(_stamp, files), *map(str, options)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
    return str(path.resolve()), found.st_size, found.st_mtime_ns
