"""Progress of long work on standard error; nothing when it is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_STEPS = 500  # redraws at most


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar until the block ends; what is yielded is called with how many more are done."""
    with progress_of(what) as update:
        done, shown, each = 0, 0, max(1, total // _STEPS)
        update(done, total)

        def advance(more: int = 1) -> None:
            nonlocal done, shown
            done += more
            if done - shown >= each:
                shown = done
                update(done, total)

        yield advance


@contextmanager
def progress_of(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar; what is yielded is called with (done, total), and the bar pulses until then."""
    with _bar(what, MofNCompleteColumn(), TimeRemainingColumn()) as update:
        yield update


@contextmanager
def progress_share(what: str) -> Iterator[Callable[[float], None]]:
    """Show a bar; what is yielded is called with the share that is done."""
    with _bar(what, TimeElapsedColumn()) as update:
        yield lambda share: update(share, 1)


class ReadingProgress:
    """A bar for the share of the weights that is read while a device opens, if it reads them."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._update: Callable[[float], None] | None = None

    def __call__(self, share: float) -> None:
        """Show a share; the bar appears with the first one and goes with the whole."""
        if self._update is None:
            self._update = self._stack.enter_context(progress_share("reading weights"))
        self._update(share)
        if share >= 1:
            self._stack.close()
            self._update = None


class TerminalReporter:
    """A reporter that shows what a sweep does: lines on standard output, bars on standard error."""

    def say(self, line: str) -> None:
        """Print a line, at once."""
        print(line, flush=True)

    def steps(self, what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Open a bar that is told how many more are done."""
        return progress(what, total)

    def share(self, what: str) -> AbstractContextManager[Callable[[int, int], None]]:
        """Open a bar that is told how many of how many are done."""
        return progress_of(what)


@contextmanager
def _bar(what: str, *columns: ProgressColumn) -> Iterator[Callable[[float, float], None]]:
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
