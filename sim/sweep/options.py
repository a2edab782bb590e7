"""Options of a sweep, and the protocol of what it reports to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep is run, and where its results go."""

    out: str
    engine: str
    per_sequence: bool  # keep what each sequence took, and write it
    jobs: int
    backend: str
    scheduler: str | None
    replace: bool  # drop what earlier results hold beside what is asked for
    yes: bool  # run however many cells there are

    @property
    def outputs(self) -> dict[str, str | Path | None]:
        """The files to be written, by option."""
        beside = self.per_sequence or Path(self.beside).exists()  # which is renewed with the rows
        return {
            "--out": self.out,
            "--per-sequence": self.beside if beside else None,
            "--out, until it is written,": self.journal,
        }

    @property
    def beside(self) -> str:
        """The file of what each sequence took."""
        return str(Path(self.out).with_suffix(".sequences.parquet"))

    @property
    def journal(self) -> Path:
        """The file that keeps finished cells until the results are written."""
        return Path(f"{self.out}.unfinished")


class SweepReporter(Protocol):
    """A receiver of what a sweep reports while it runs."""

    def say(self, line: str) -> None:
        """Show a line, at once."""

    def steps(self, what: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
        """Show progress while a block runs, which calls what is yielded with how many more."""

    def share(self, what: str) -> AbstractContextManager[Callable[[int, int], object]]:
        """Show progress while a block runs, which calls what is yielded with (done, total)."""


class SilentReporter:
    """A reporter that shows nothing."""

    def say(self, line: str) -> None:
        """Drop the line."""

    def steps(self, what: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
        """Drop the progress."""
        return nullcontext(lambda more: None)

    def share(self, what: str) -> AbstractContextManager[Callable[[int, int], object]]:
        """Drop the progress."""
        return nullcontext(lambda done, total: None)
