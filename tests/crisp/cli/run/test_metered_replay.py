"""crisp replay: where the joules of a run come from, and what explain says of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from crisp.run.compare import read_timeline_rows
from crisp.run.result import load_runs, save_runs
from crisp.run.timeline import STEP
from tests.crisp.cli.conftest import Done
from tests.crisp.cli.toy import CONFIG
from tests.hw.telemetry.test_metering import FakeMeter

pytest.importorskip("torch")


@pytest.fixture
def replayed(crisp: Callable, trace: Path, tmp_path: Path) -> Callable[..., Done]:
    """Replays the toy trace with more options, into run.json."""
    config, store, file = tmp_path / "config.json", tmp_path / "store", tmp_path / "run.json"
    config.write_text(json.dumps(CONFIG))
    assert crisp("pack", "--synthetic", config, "--out", store).code == 0

    def run(*options: object) -> Done:
        done: Done = crisp(
            "replay", trace, "--store", store, "--policy", "lru", "--budget", "30%", "--json",
            file, *options,
        )  # fmt: skip
        return done

    return run


@pytest.fixture
def measured(replayed: Callable[..., Done], tmp_path: Path) -> Callable[..., Path]:
    """The same, of runs that succeed; the file."""

    def run(*options: object) -> Path:
        done = replayed(*options)
        assert done.code == 0, done.err
        return tmp_path / "run.json"

    return run


def metered(monkeypatch: pytest.MonkeyPatch, fake: FakeMeter) -> FakeMeter:
    """Let runs on the cpu have this meter, and no rest take time."""
    monkeypatch.setattr("crisp.hw.telemetry.meter_for", {"cpu": fake}.__getitem__)
    monkeypatch.setattr("crisp.hw.telemetry.metering.time.sleep", lambda seconds: None)
    return fake


def test_joules_of_a_meter(measured: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake one's windows last a second: 12 J, of which the idle machine draws 5."""
    metered(monkeypatch, FakeMeter(5, 12))
    run = load_runs(measured("--link-limit", "200MB/s"))[0]
    assert run.settings["device"]["link_limit"] == 200_000_000
    tokens = run.metrics["tokens"]
    assert tokens
    assert run.metrics["energy_j_per_token"] == 12 / tokens
    assert run.metrics["energy_net_j_per_token"] == 7 / tokens
    assert run.provenance["energy"]["source"] == "fake"
    assert run.provenance["energy"]["method"].startswith("measured: made up")
    assert run.provenance["energy"]["window_ns"] == 10**9


def test_a_meter_that_cannot_be_read_is_a_reason(
    measured: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    metered(monkeypatch, FakeMeter(reason="locked away"))
    run = load_runs(measured("--energy-within", "5%"))[0]
    for name in ("energy_j_per_token", "energy_net_j_per_token"):
        assert run.metrics[name] is None
        assert run.unavailable[name] == "locked away"
    assert run.provenance["energy"] is None


def test_runs_are_repeated_until_the_interval_is_narrow(
    replayed: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10, 12 and 11 J above 5 of rest, so 11 ± 2.48: within 23 % of 11, not of the 6 above rest."""
    fake = metered(monkeypatch, FakeMeter(5, 10, 5, 12, 5, 11, off=0.1))
    timeline = tmp_path / "run.parquet"
    done = replayed("--energy-within", "23%", "--limit", 11, "--timeline", timeline)
    assert (done.code, done.err) == (0, "")
    assert fake.joules == []
    table, *rest = done.out[done.out.index("J/token: ") :].splitlines()
    assert table == "J/token: measured, from fake"
    assert rest == [
        "lru at 30%: 1.00 ± 0.23 J/token, of it 0.55 ± 0.23 above rest; means of 3 runs and their "
        "95 %",
        "        intervals: within 23 %",
    ]
    run = load_runs(tmp_path / "run.json")[0]
    assert run.metrics["energy_j_per_token"] == pytest.approx(1)
    assert run.metrics["energy_net_j_per_token"] == pytest.approx(6 / 11)
    repeats = run.provenance["repeats"]
    assert repeats["half_width"]["energy_j_per_token"] == pytest.approx(2.48414 / 11, rel=1e-5)
    assert (repeats["runs"], repeats["reached"]) == (3, True)
    assert repeats["each"]["energy_j"] == [10, 12, 11]
    assert sum(repeats["each"]["total_ns"]) / 3 == pytest.approx(run.metrics["total_ns"], abs=0.5)
    # the timeline is the first run's
    steps = read_timeline_rows(timeline)[:, STEP]
    assert steps[-1] == 10
    assert sorted(steps) == list(steps)


def test_ctrl_c_ends_the_repeats_and_leaves_what_was_measured(
    replayed: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(FakeMeter):
        def start(self) -> None:
            if not self.joules:
                raise KeyboardInterrupt
            super().start()

    metered(monkeypatch, Interrupted(5, 10, 5, 12, off=5))
    done = replayed("--energy-repeats", 9, "--budget", "30%,50%")
    assert (done.code, done.err) == (130, "interrupted\n")
    assert "means of 2 runs and their 95 %" in done.out
    assert "a window of 1 s is short for this meter" in done.out
    (run,) = load_runs(tmp_path / "run.json")
    assert run.provenance["repeats"]["ended"] == "interrupted"


def test_speed_is_repeated_without_a_meter(
    replayed: Callable[..., Done], crisp: Callable, trace: Path, tmp_path: Path
) -> None:
    """All values are kept, the mean is theirs, and compare says what is outside the interval."""
    done = replayed("--repeats", 3, "--limit", 11)
    assert (done.code, done.err) == (0, "")
    words = " ".join(done.out.split())
    told = "means of 3 runs and their 95 % intervals: as many as were asked for"
    assert re.search(rf"lru at 30%: [\d.,]+ ± [\d.,]+ tokens/s, [^;]+; {told}", words)
    run = load_runs(tmp_path / "run.json")[0]
    repeats = run.provenance["repeats"]
    speeds = repeats["each"]["tokens_per_second"]
    assert len(speeds) == 3
    assert run.metrics["tokens_per_second"] == pytest.approx(sum(speeds) / 3)
    assert "bytes_loaded" not in repeats["each"]  # the same in all
    simulated = tmp_path / "simulated.json"
    done = crisp(
        "simulate", trace, "--model", tmp_path / "store", "--policy", "lru", "--budget", "30%",
        "--limit", 11, "--json", simulated,
    )  # fmt: skip
    assert done.code == 0, done.err
    done = crisp("compare", simulated, tmp_path / "run.json")
    assert done.code == 0, done.err
    lines = {line.split()[0]: line for line in done.out.splitlines() if line}
    assert lines["simulated"].endswith("differs")
    assert "±" in lines["tokens_per_second"]
    assert lines["bytes_loaded"].endswith("no")
    assert "95 % intervals: as many as were asked for\ndiffers: the simulated value is" in done.out


def test_how_often_is_asked_for_once(replayed: Callable[..., Done]) -> None:
    done = replayed("--repeats", 3, "--energy-within", "5%")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: --repeats 3: not together with --energy-within or")


def test_a_wrong_share_is_told_before_the_work(replayed: Callable[..., Done]) -> None:
    done = replayed("--energy-within", "5")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: --energy-within 5: expected a share of the mean, such as 5%\n"


def test_a_power_model_only_if_asked_for(
    measured: Callable[..., Path], crisp: Callable, trace: Path, tmp_path: Path
) -> None:
    run = load_runs(measured("--modelled-energy", "--hardware", "rtx4090-pcie4"))[0]
    assert (run.metrics["energy_j_per_token"] or 0) > 0
    assert run.provenance["energy"] == {
        "method": "modelled: power of each state of the streams times its duration",
        "source": "hardware profile rtx4090-pcie4",
    }
    assert run.settings["hardware"]["name"] == "rtx4090-pcie4"
    without = crisp(
        "replay", trace, "--store", tmp_path / "store", "--policy", "lru", "--budget", "30%",
        "--modelled-energy",
    )  # fmt: skip
    assert (without.code, without.out) == (2, "")
    assert without.err == (
        "error: --modelled-energy: needs a machine's profile; name it with --hardware\n"
    )


@pytest.mark.parametrize("options", [(), ("--modelled-energy", "--hardware", "rtx4090-pcie4")])
def test_explain_knows_no_bounds_of_a_measured_run(
    measured: Callable[..., Path], crisp: Callable, options: tuple[str, ...]
) -> None:
    file = measured(*options)
    told = "bounds are not known of a measured run; crisp compare lays it beside a simulated one"
    done = crisp("explain", file)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("run 1 of 1: lru at 30% on cpu; ")
    assert lines[-1] == told
    assert "near bound" not in done.out
    save_runs(load_runs(file) * 2, file)
    table = crisp("explain", file).out.splitlines()
    assert table[1].endswith("not known")
    assert told in table
