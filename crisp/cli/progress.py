"""Progress of long work on standard error; nothing when it is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_STEPS = 500  # redraws at most


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar; what is yielded is told how many more are done. It is gone when the block ends."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=total)
        waiting, each = 0, max(1, total // _STEPS)

        def advance(more: int = 1) -> None:
            nonlocal waiting
            waiting += more
            if waiting >= each:
                bar.advance(task, waiting)
                waiting = 0

        yield advance
