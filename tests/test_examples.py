"""The scripts in examples/ run as they stand, and print what they promise."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What an example prints, run in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["example"])
    monkeypatch.syspath_prepend(EXAMPLES)  # as python EXAMPLE does

    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        assert not list(tmp_path.iterdir())  # nothing is left behind
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_read_in_a_minute(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert f"[{path.name}]({path.name})" in readme


@pytest.mark.seconds
def test_capture_and_simulate(printed) -> None:
    pytest.importorskip("transformers")
    rows = re.findall(
        r"^(\w+) +([\d.]+) tokens/s +([\d,]+) MB", printed("capture_and_simulate.py"), re.M
    )
    assert [name for name, *_ in rows] == ["fo", "lru", "crisp"]
    speeds = [float(speed) for _, speed, _ in rows]
    assert speeds == sorted(speeds)
    assert rows[0][2] == "1,123"  # 6 layers, 2 experts of 93.6 MB: full offloading loads them all


@pytest.mark.seconds
def test_own_policy(printed) -> None:
    pytest.importorskip("torch")
    first, second = printed("own_policy.py").splitlines()
    assert first.removeprefix("simpy ") == second.removeprefix("hw    ")  # they decide the same
    assert re.fullmatch(r"simpy [1-9]\d* hits, [1-9][\d,]+ bytes loaded", first)


@pytest.mark.seconds
def test_own_machine(printed) -> None:
    rows = re.findall(r"^(\S+) +([\d.]+) ms a token$", printed("own_machine.py"), re.M)
    assert [name for name, _ in rows] == [
        "my-machine.toml",
        "jetson-agx-orin-32gb",
        "rtx4090-pcie4",
    ]
    mine, orin, card = (float(ms) for _, ms in rows)
    assert mine > card > orin > 0  # the slowest link loses


@pytest.mark.seconds
def test_sweep(printed) -> None:
    rows = re.findall(r"^(tiered\S+) +(\d+%) +([\d.]+)", printed("sweep.py"), re.M)
    assert [budget for _, budget, _ in rows] == ["10%"] * 5 + ["30%"] * 5
    assert rows[0][0] == rows[5][0] == "tiered(alpha=0.2,beta=0.6)"  # the narrowest loads least


@pytest.mark.seconds
def test_energy(printed) -> None:
    out = printed("energy.py")
    assert re.match(r"[\d.]+ s, exit code 0\n", out)
    assert "no joules: " in out or " J +- " in out
