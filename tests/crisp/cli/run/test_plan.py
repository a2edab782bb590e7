"""``crisp plan`` and ``--budget auto``: what is printed, refused, and run."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from safetensors import safe_open

from crisp.hw.budget import MemoryPlan, RunNeeds, plan_memory
from crisp.hw.memory import MemoryLimit
from crisp.hw.store.packing import pack
from tests.crisp.cli.conftest import Done

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "traces" / "tiny-mixtral"
EXPERT = 245_760  # bytes: 20 blocks of 12,288
FOR_GPUS = (
    pytest.importorskip("torch").version.cuda is not None
)  # such a build takes more, on any machine
PROMPT = "In the beginning of the journey, there was"

Crisp = Callable[..., Done]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stores") / "tiny"
    pack(MODEL, out, block=16)
    return out


def test_a_plan(crisp: Crisp, store: Path, tmp_path: Path) -> None:
    """What is left of 419 MB is 4.6 MB: 18 of 48 experts; then a fourth of all, 12, a step."""
    out = tmp_path / "plan.json"
    done = crisp("plan", MODEL, "--store", store, "--limit", "419MB", "--json", out)
    assert (done.code, done.err) == (0, "")
    plan = json.loads(out.read_text())
    parts = plan["parts"]
    with safe_open(MODEL / "model.safetensors", "numpy") as file:
        names = [name for name in file.keys() if ".experts." not in name]  # noqa: SIM118
        rest = sum(2 * file.get_slice(name).get_shape()[0] for name in names if "norm" in name)
        for name in names:
            shape = file.get_slice(name).get_shape()
            rest += 2 * shape[0] * shape[1] if len(shape) == 2 else 0
    assert parts["other weights"] == rest
    assert parts["staging"] == 2 * EXPERT
    room = 419_000_000 - sum(parts.values())
    experts = room // EXPERT
    assert plan["budget_bytes"] == experts * EXPERT
    assert 0 < experts < 36
    sizes = [step["budget_bytes"] // EXPERT for step in plan["steps"]]
    assert sizes == [experts // 2, *range(experts, 48, 12), 48]
    assert [step["chosen"] for step in plan["steps"]] == [n == experts for n in sizes]
    lines = done.out.splitlines()
    assert lines[1].split() == ["--limit", "419MB", "419", "MB"]
    assert lines[-1] == "tokens/s –: give --hardware PROFILE and --trace TRACE"


def test_with_a_profile_and_a_trace_speeds_are_simulated(crisp: Crisp, store: Path) -> None:
    """As crisp simulate says of that budget."""
    machine = ("--hardware", "paper-table1")
    done = crisp("plan", MODEL, "--store", store, "--limit", "419MB", *machine,
                 "--trace", "tiny-mixtral-docs", "--json", "-")  # fmt: skip
    assert done.code == 0, done.err
    step = next(step for step in json.loads(done.out)["steps"] if step["chosen"])
    simulated = crisp("simulate", "tiny-mixtral-docs", "--model", store, *machine,
                      "--policy", "lru", "--budget", f"{step['budget_bytes']}B",
                      "--limit", 500, "--json", "-")  # fmt: skip
    metrics = json.loads(simulated.out)["metrics"]
    assert step["tokens_per_second"] == metrics["tokens_per_second"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--limit", "300MB"), "--limit 300MB allows 300 MB, of which all but experts takes 41"),
        (("--limit", "much"), "--limit: 'much' is not a size"),
        (("--hardware", "nope.toml"), "nope.toml"),
        (("--trace", "nope"), "unknown trace 'nope'"),
        (("--metadata", "nope"), "nope"),
        (("--prompt-tokens", 0), "--prompt-tokens 0: expected 1 or more"),
        (("--threads", 0), "threads 0: must be at least 1 and at most 1024"),
    ],
)
def test_refusals(crisp: Crisp, store: Path, more: tuple[object, ...], message: str) -> None:
    done = crisp("plan", MODEL, "--store", store, *more)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1


def generate(store: Path, *more: object) -> list[object]:
    return ["generate", MODEL, "--store", store, "--policy", "lru", "--prompt", PROMPT,
            "--max-new-tokens", 8, *more]  # fmt: skip


def limited(monkeypatch: pytest.MonkeyPatch, experts: int) -> None:
    """Let a group leave room for so many experts, whatever this process has."""

    def planned(needs: RunNeeds) -> MemoryPlan:
        taken = 10**9 - plan_memory(needs, [MemoryLimit("a group", 10**9, 0)]).room
        return plan_memory(needs, [MemoryLimit("a group", taken + experts * EXPERT, 0)])

    for module in ("crisp.hw.budget", "crisp.hw.model.memory"):
        monkeypatch.setattr(f"{module}.plan_memory", planned)


def test_the_text_and_the_settings_are_those_of_the_same_bytes(
    crisp: Crisp, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 17)
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    done = crisp(*generate(store, "--budget", "auto", "--json", one))
    assert done.code == 0, done.err
    assert done.err.startswith("budget auto: 4.18 MB, 35% of the experts; a group allows ")
    again = crisp(*generate(store, "--budget", f"{17 * EXPERT}B", "--json", other))
    assert done.out.splitlines()[0] == again.out.splitlines()[0]
    settings = [json.loads(path.read_text())["settings"] for path in (one, other)]
    assert settings[0] == settings[1]
    assert settings[0]["budget"]["bytes"] == 17 * EXPERT
    assert settings[0]["budget"]["asked"] == f"{17 * EXPERT}B"


def test_what_cannot_fit_is_refused_before_it_is_loaded(
    crisp: Crisp, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 0)
    monkeypatch.setattr("crisp.hw.model.resident.open_resident", None)
    done = crisp(*generate(store, "--budget", "auto"))
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert done.err.endswith("and experts 246 kB each: 246 kB are missing\n")


def test_a_replay_beside_a_share(
    crisp: Crisp, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 9)
    done = crisp("replay", "tiny-mixtral-docs", "--store", store, "--policy", "lru",
                 "--budget", "10%,auto", "--limit", 5)  # fmt: skip
    assert done.code == 0, done.err
    assert "budget 10%: 4 of 48 experts" in done.out
    assert f"budget {9 * EXPERT}B: 9 of 48 experts" in done.out


def test_where_auto_is_refused(crisp: Crisp, store: Path) -> None:
    lines = (
        ("simulate", "tiny-mixtral-docs", "--policy", "lru", "--budget", "auto"),
        generate(store, "--budget", "auto", "--device", "cuda"),
        generate(store, "--budget", "auto", "--dry-run"),
    )
    messages = (
        "crisp plan says what it would be",
        "is of device cpu, found cuda",
        "see crisp plan",
    )
    for line, message in zip(lines, messages, strict=True):
        done = crisp(*line)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert message in done.err


@pytest.mark.seconds
def test_under_a_real_limit_of_addresses(store: Path, tmp_path: Path) -> None:
    """ulimit -v, in a process of its own: it runs, and the limit is what decides."""
    most = 5_500_000_000 if FOR_GPUS else 3_500_000_000
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if resource.RLIM_INFINITY != hard < most:
        pytest.skip("the limit of addresses is lower already")
    done = subprocess.run(
        [sys.executable, "-m", "crisp", *map(str, generate(store, "--budget", "auto"))],
        capture_output=True, text=True, timeout=180, cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = f"; ulimit -v allows {most / 1e9:.2g} GB"
    assert told in done.stderr or "100% of the experts" in done.stderr


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup in which a run has room, but not much, of version 1 or 2."""
    root = Path("/sys/fs/cgroup")
    second = (root / "cgroup.controllers").exists()
    folder = (root if second else root / "memory") / f"crisp-test-{os.getpid()}"
    try:
        if second:
            (root / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"{folder}: {error.strerror}")
    try:
        (folder / ("memory.max" if second else "memory.limit_in_bytes")).write_text(
            "720000000" if FOR_GPUS else "440000000"
        )
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.seconds
def test_under_a_real_memory_group(store: Path, group: Path) -> None:
    """Nothing is killed, and the group is what decides."""
    enter = 'echo $$ > "$0"/cgroup.procs && exec "$@"'
    line = [sys.executable, "-m", "crisp", *map(str, generate(store, "--budget", "auto"))]
    done = subprocess.run(
        ["sh", "-c", enter, str(group), *line],
        capture_output=True, text=True, timeout=180, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "; its memory group allows " in done.stderr
