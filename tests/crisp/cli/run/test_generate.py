"""``crisp generate``: text as it is made, a summary, files, and mistakes in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.checkpoint.loading import load_model
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.store.packing import pack
from crisp.trace import RoutingTrace
from tests.crisp.cli.conftest import Done
from tests.hw.model.test_generate import Breaking, fails, interrupts
from tests.hw.telemetry.test_metering import FakeMeter

MODEL = Path(__file__).parents[4] / "traces" / "tiny-mixtral"
PROMPT = "In the beginning of the journey, there was"

Crisp = Callable[..., Done]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stores") / "tiny"
    pack(MODEL, out)
    return out


@pytest.fixture(scope="module")
def text() -> str:
    """What the model, loaded by transformers, writes in 8 tokens."""
    import torch

    loaded = load_model(str(MODEL))
    ids = loaded.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    made = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
    )
    written: str = loaded.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    return written


def line(store: Path, *more: object, policy: str = "lru") -> list[object]:
    return ["generate", MODEL, "--store", store, "--policy", policy, "--budget", "30%",
            "--prompt", PROMPT, "--max-new-tokens", 8, *more]  # fmt: skip


def test_text_then_a_summary(crisp: Crisp, store: Path, text: str) -> None:
    done = crisp(*line(store))
    assert (done.code, done.err) == (0, "")
    rows = len(load_model(str(MODEL)).tokenizer(PROMPT)["input_ids"]) + 7  # the last is not fed
    assert done.out.startswith(f"{text}\n\nlru at 30%: 8 tokens ({rows} with the prompt), ")
    summary = done.out.removeprefix(f"{text}\n\n").splitlines()
    parts = [part.split(" ", 1)[1] for part in summary[0].split(", ")[1:]]
    assert parts == ["tokens/s", "ms to the first", "MB/token", "% hits", "J/token"]


def test_it_is_written_again_for_its_joules(
    crisp: Crisp, store: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10, 12 and 11 J are 11 ± 2.48."""
    fake = FakeMeter(5, 10, 5, 12, 5, 11)
    monkeypatch.setattr("crisp.hw.telemetry.meter_for", {"cpu": fake}.__getitem__)
    monkeypatch.setattr("crisp.hw.telemetry.metering.time.sleep", lambda seconds: None)
    file = tmp_path / "r.json"
    done = crisp(*line(store, "--json", file, "--energy-within", "23%"))
    assert (done.code, done.err) == (0, "")
    assert done.out.count(text) == 1
    last = done.out.splitlines()[-1]
    assert last.startswith("energy measured, from fake: ")
    assert last.endswith("above rest; means of 3 runs and their 95 % intervals: within 23 %")
    run = json.loads(file.read_text())
    assert run["metrics"]["energy_j"] == pytest.approx(11)
    assert run["provenance"]["repeats"]["runs"] == 3


def test_files(crisp: Crisp, store: Path, text: str, tmp_path: Path) -> None:
    names = {"json": "r.json", "timeline": "t.parquet", "perfetto": "p.json", "record": "own"}
    asked = [part for key, name in names.items() for part in (f"--{key}", tmp_path / name)]
    assert crisp(*line(store, *asked, policy="mo")).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names.values())
    run = json.loads((tmp_path / "r.json").read_text())
    trace = RoutingTrace.load(tmp_path / "own")
    assert trace.guess is not None
    assert run["settings"]["trace"]["sha256"] == trace.digest()
    assert run["settings"]["policy"]["prefetch"] == "guess"
    done = crisp("simulate", tmp_path / "own", "--policy", "lru", "--budget", "30%", "--phase",
                 "all", "--profile", tmp_path / "own")  # fmt: skip
    assert (done.code, done.err) == (0, "")


def test_a_store_in_memory_is_told(
    crisp: Crisp, store: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("file_system", "block_io"):
        monkeypatch.setattr(f"crisp.hw.store.{module}.memory_file_system", lambda path: "tmpfs")
    done = crisp(*line(store, "--json", tmp_path / "r.json"))
    assert done.code == 0
    assert done.out.startswith(text)
    assert done.err == (
        f"note: {store} lies in memory (tmpfs): loads are copies there, not reads of a disk\n"
    )
    device = json.loads((tmp_path / "r.json").read_text())["settings"]["device"]
    assert device["direct"] is False
    assert device["why_not_direct"]


def test_data_on_standard_output_sends_text_to_standard_error(
    crisp: Crisp, store: Path, text: str
) -> None:
    done = crisp(*line(store, "--json", "-"))
    assert json.loads(done.out)["metrics"]["tokens"] > 8
    assert done.err.startswith(f"{text}\n\nlru at 30%: ")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--cache", "belady"], "policy lru: cache belady is an oracle, and nobody knows what "
         "will be generated; crisp simulate takes it, with a trace"),
        (["--prefetch", "frequent"], "policy lru: prefetch frequent asks a trace which experts "
         "follow which, and there is none; none, previous or guess was expected"),
        (["--width", "tiered"], "policy lru: width tiered needs counts of combinations; give "
         "--metadata FILE, as crisp prepare writes it"),
        (["--order", "johnson"], "order johnson: asks for times; --hardware PROFILE "
         "says whose, and crisp calibrate measures this machine's"),
        (["--budget", "1%%"], "budget '1%%': '1%%' is not a number"),
        (["--link-limit", "fast"], "--link-limit: 'fast' is not a size; write 4GB, 512MiB or "
         "a number of bytes"),
        (["--json", "x", "--record", "x"], "--record: --json goes to x already"),
        (["--record", "-"], "--record -: a file name was expected"),
        (["--device", "cpuu"], "unknown device 'cpuu'; did you mean 'cpu'? known: cpu, "
         "cuda, unified"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(crisp: Crisp, store: Path, more: list[str], told: str) -> None:
    done = crisp(*line(store, *more))
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {told}\n"


def test_no_store_and_no_model(crisp: Crisp, store: Path, tmp_path: Path) -> None:
    done = crisp(*line(tmp_path))
    assert done.err == (
        f"error: {tmp_path}: lacks store.json; an expert store was expected (crisp pack makes "
        "one)\n"
    )
    arguments = line(store)
    arguments[1] = "nowhere"
    done = crisp(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: nowhere: is no folder;")


@pytest.mark.parametrize(
    ("instead", "code", "told"),
    [(fails, 2, "error: the disk is gone\n"), (interrupts, 130, "interrupted\n")],
    ids=["failure", "Ctrl-C"],
)
def test_what_was_right_stays_and_files_do_not_appear(
    crisp: Crisp, store: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    instead: Callable[[], Any], code: int, told: str,
) -> None:  # fmt: skip
    # without a cache a pass is 12 loads, and one of the prompt more: this is after some tokens
    broken = Breaking(at=5 * 12 + 40, instead=instead)
    monkeypatch.setattr(DeviceOptions, "open", lambda self, store, slots: broken.open(store, slots))
    asked = ["--json", "r.json", "--timeline", "t", "--record", "own"]
    monkeypatch.chdir(tmp_path)
    done = crisp(*line(store, *asked, policy="fo"))
    assert (done.code, done.err) == (code, told)
    assert done.out.endswith("\n") and 0 < len(done.out) < len(text)
    assert text.startswith(done.out.removesuffix("\n"))
    assert list(tmp_path.iterdir()) == []
