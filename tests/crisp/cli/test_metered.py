"""crisp replay: where the joules of a run come from, and what explain says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import hw.metering
import hw.telemetry
from crisp.run import load, save
from tests.crisp.cli.toy import CONFIG
from tests.hw.test_metering import FakeMeter

pytest.importorskip("torch")


@pytest.fixture
def measured(crisp: Callable, trace: Path, tmp_path: Path) -> Callable[..., Path]:
    """Replays the toy trace with more options; the file of the run."""
    config, store, file = tmp_path / "config.json", tmp_path / "store", tmp_path / "run.json"
    config.write_text(json.dumps(CONFIG))
    assert crisp("pack", "--synthetic", config, "--out", store).code == 0

    def run(*options: object) -> Path:
        done = crisp(
            "replay", trace, "--store", store, "--policy", "lru", "--budget", "30%", "--json",
            file, *options,
        )  # fmt: skip
        assert done.code == 0, done.err
        return file

    return run


def test_joules_of_a_meter(measured: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake one's windows last a second: 12 J, of which the idle machine draws 5."""
    monkeypatch.setattr(hw.telemetry, "meters", lambda: (FakeMeter(5, 12),))
    monkeypatch.setattr(hw.metering.time, "sleep", lambda seconds: None)
    run = load(measured("--link-limit", "200MB/s"))[0]
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
    monkeypatch.setattr(hw.telemetry, "meters", lambda: (FakeMeter(reason="locked away"),))
    run = load(measured())[0]
    for name in ("energy_j_per_token", "energy_net_j_per_token"):
        assert run.metrics[name] is None
        assert run.unavailable[name] == "locked away"
    assert run.provenance["energy"] is None


def test_a_power_model_only_if_asked_for(
    measured: Callable[..., Path], crisp: Callable, trace: Path, tmp_path: Path
) -> None:
    run = load(measured("--modelled-energy", "--hardware", "rtx4090-pcie4"))[0]
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
    save(load(file) * 2, file)
    table = crisp("explain", file).out.splitlines()
    assert table[1].endswith("not known")
    assert told in table
