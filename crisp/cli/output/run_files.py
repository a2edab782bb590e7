"""The files that a run is asked for: checked before it, complete or absent after it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import crisp.run.result
from crisp.cli.options.files import STDOUT, Name, check_outputs
from crisp.errors import CrispError
from crisp.hardware.profile import Power
from crisp.model.spec import ModelSpec
from crisp.report.perfetto import perfetto
from crisp.report.plots import check_format, draw_gantt, select_first_events
from crisp.run.result import Run
from crisp.run.sinks import TimelineWindow, parquet
from crisp.run.timeline import STEP, Sink

_PLOTTED_STEP = 100  # or the last one of a shorter run: by then the cache has settled


@dataclass(frozen=True)
class Outputs:
    """The files that a run is written to: names, - for standard output, or None."""

    json: str | None = None
    timeline: str | None = None
    perfetto: str | None = None
    plot: str | None = None

    @property
    def to_stdout(self) -> bool:
        """Whether standard output carries data, so that text for people goes elsewhere."""
        return STDOUT in vars(self).values()

    def check(self, cells: int, inputs: Iterable[tuple[str, Name]], timeline: bool = True) -> None:
        """Raise CrispError for what could not be written after the work, or makes no sense.

        cells: how many runs; inputs: as `check_outputs` takes them; timeline: whether they have
        one.
        """
        files = {f"--{option}": name for option, name in vars(self).items() if name is not None}
        for option, name in files.items():
            if option != "--json" and not timeline:
                raise CrispError(f"{option}: engine fast keeps no timeline; use --engine simpy")
            if option != "--json" and cells > 1:
                raise CrispError(f"{option}: needs one policy and one budget, found {cells} runs")
            if name == STDOUT and option in ("--timeline", "--plot") and sys.stdout.isatty():
                raise CrispError(f"{option} -: is not text; send it to a file or a program")
            if name != STDOUT and option == "--plot":
                check_format(Path(name))
        check_outputs(files, inputs)

    @contextmanager
    def sinks(
        self, title: str, spec: ModelSpec, power: Power | None, trace: str
    ) -> Iterator[Sequence[Sink]]:
        """Open the sinks for a run's timeline; files appear, complete, when the block ends.

        title: its conditions in a line. power: of the machine, if it is known. trace: its name.
        """
        with ExitStack() as stack:
            sinks: list[Sink] = []
            if self.timeline is not None:
                sinks.append(stack.enter_context(parquet(_binary(self.timeline))))
            if self.perfetto is not None:
                target = sys.stdout if self.perfetto == STDOUT else Path(self.perfetto)
                sinks.append(stack.enter_context(perfetto(target, title, spec.block_bytes, power)))
            window = None
            if self.plot is not None:
                window = TimelineWindow(_PLOTTED_STEP)
                sinks.append(window)
            yield sinks
            if self.plot is not None and window is not None:
                drawn = select_first_events(window.rows)
                name = f"step {int(drawn[0, STEP])}"
                if len(drawn) < len(window.rows):
                    name += ", its first events"
                draw_gantt(
                    _binary(self.plot),
                    {name: drawn},
                    spec.n_blocks,
                    title,
                    f"Routing: {trace}.",
                )

    def write_runs(self, runs: Sequence[Run]) -> None:
        """Write the run, or the list of them."""
        if self.json is None:
            return
        content = runs[0] if len(runs) == 1 else list(runs)
        if self.json == STDOUT:
            sys.stdout.write(crisp.run.result.to_json(content))
        else:
            crisp.run.result.save_runs(content, self.json)


def _binary(name: str) -> Path | IO[bytes]:
    return sys.stdout.buffer if name == STDOUT else Path(name)
