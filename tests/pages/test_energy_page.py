"""Every command of docs/energy.md runs, in its order, and prints what stands there."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import crisp.hw.telemetry
import crisp.hw.telemetry.metering
from crisp.hardware.energy import Probe, Reading
from tests.consoles import check_console

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


class MadeUp:
    """10 W at rest over 2 s, then a run of 4 s, about 67 J; and so on."""

    name = "made up"

    def __init__(self) -> None:
        runs = itertools.cycle((65.0, 69.0, 67.0, 67.0))
        pairs = ((Reading(20.0, None, *self._told(2), 0.1), Reading(one, None, *self._told(4), 0.1))
                 for one in runs)  # fmt: skip
        self._readings: Iterator[Reading] = itertools.chain.from_iterable(pairs)

    @staticmethod
    def _told(seconds: int) -> tuple[str, str, int, int]:
        return "a made-up meter", "made up", 11, seconds * 10**9

    def probe(self) -> Probe:
        return Probe(self.name)

    def start(self) -> None:
        self._times = [time.monotonic_ns()]

    def sample(self) -> None:
        """Where a prompt ends: 7 J have been drawn by then."""
        self._times.append(time.monotonic_ns())

    def stop(self) -> Reading:
        made = next(self._readings)
        *prompt, end = zip((*self._times, time.monotonic_ns()), (0.0, 7.0, 0.0), strict=False)
        return replace(made, curve=(*prompt, (end[0], made.joules or 0.0)))


@pytest.mark.slow
def test_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(crisp.hw.telemetry.metering.time, "sleep", lambda seconds: None)
    meter = MadeUp()
    monkeypatch.setattr(crisp.hw.telemetry, "meter_for", lambda device: meter)
    page = (ROOT / "docs" / "energy.md").read_text(encoding="utf-8")
    assert len(check_console(page, capsys)) == 4
    assert json.loads(Path("sleep.json").read_text(encoding="utf-8"))["reached"] is True
    for run in json.loads(Path("replayed.json").read_text(encoding="utf-8")):
        repeats = run["provenance"]["repeats"]
        assert (repeats["runs"], repeats["reached"]) == (4, True)
