"""The command on small logs of the same layout as the real ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crisp.diagnose.route_log import random_routing, write_log


@pytest.fixture
def log(tmp_path: Path) -> Path:
    prompt = random_routing(1, 5, 4, 16, 2, pruned=True)
    return write_log(
        tmp_path / "toy.route.csv", prompt, random_routing(2, 30, 4, 16, 2), (9000, 8000) * 2, 16
    )


def test_a_screenful(crisp: Callable, log: Path) -> None:
    done = crisp("diagnose", log, "--budget", "25%")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 100
    assert lines[0] == "log      toy.route.csv: 5 prompt tokens, 30 decoded; toy-Q4.gguf"
    assert "rule     bigmoeonedge: one LRU for all layers, in bytes; evicts after a call" in lines
    assert any(line.startswith("Is it the policy or the working set?  ") for line in lines)
    assert any(line.startswith("Most help, one of each kind:") for line in lines)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "engine",
    [
        "llama.cpp-mmap",
        "llama.cpp-moe-cache",
        "colibri",
        "colibri-lfru",
        "omlx",
        "moe-infinity",
        "ds4",
    ],
)
def test_every_engine(crisp: Callable, log: Path, engine: str) -> None:
    done = crisp("diagnose", log, "--engine", engine, "--budget", "25%")
    assert done.code == 0 and f"rule     {engine}: " in done.out


def test_times_of_a_machine(crisp: Callable, log: Path) -> None:
    done = crisp("diagnose", log, "--budget", "25%", "--hardware", "rtx4090-pcie4")
    assert "machine  rtx4090-pcie4; ms are of loads alone, one after the other" in done.out
    assert " ms a token" in done.out


@pytest.mark.seconds
def test_files(crisp: Callable, log: Path, tmp_path: Path) -> None:
    html, figures = tmp_path / "page.html", tmp_path / "figures.json"
    done = crisp("diagnose", log, "--budget", "25%", "--html", html, "--json", figures)
    assert done.code == 0
    content = json.loads(figures.read_text())
    assert content["verdict"] in content["parts"] and content["curves"]["best"]
    assert done.out.rstrip("\n").splitlines()[0] in html.read_text()
    printed = crisp("diagnose", log, "--budget", "25%", "--json", "-")
    assert json.loads(printed.out) == content and printed.err.startswith("log      toy.route.csv")


@pytest.mark.seconds
def test_a_trace_of_ours(crisp: Callable, trace: Path) -> None:
    done = crisp("diagnose", trace, "--engine", "ds4", "--budget", "30%")
    assert done.code == 0 and done.out.startswith("log      toy.trace.safetensors: ")
    assert crisp("diagnose", "tiny-mixtral-kjv", "--engine", "lru").err == (
        "error: unknown engine 'lru'; known: bigmoeonedge, llama.cpp-mmap, llama.cpp-moe-cache, "
        "colibri, colibri-lfru, omlx, moe-infinity, ds4\n"
    )


@pytest.mark.seconds
def test_bits_of_a_model(crisp: Callable, trace: Path) -> None:
    """An expert of the toy has 3 x 64 x 256 weights: 0.094 MiB in 16 bits."""
    for bits, size in ((), "0.1"), (("--bits", "64"), "0.4"):
        out = crisp("diagnose", trace, "--engine", "ds4", "--budget", "50%", *bits).out
        assert f"top-2, {size} MiB each" in out


def test_mistakes_of_one_line(crisp: Callable, log: Path, trace: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ((trace,), f"{trace}: give the engine, --engine bigmoeonedge|llama.cpp-mmap|"),
        ((tmp_path / "no.csv",), "no such file"),
        ((log, "--budget", "0"), "budget '0': must be above 0"),
        ((log, "--budget", "9GB"), "more than all experts"),
        ((log, "--json", log), "would replace LOG"),
        ((log, "--hardware", "phone"), "unknown hardware profile 'phone'"),
        ((log, "--model", "mixtral-8x7b"), "a model of 16 experts; 8 were expected"),
        ((log, "--bits", "4"), "--bits: of what model? give --model"),
        ((trace, "--engine", "ds4", "--model", "mixtral-8x7b", "--top-k", "0"), "top_k is 0"),
    ):
        done = crisp("diagnose", *arguments)
        assert done.code == 2 and message in done.err and done.err.count("\n") == 1, done.err
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    assert "pipe.csv: is not an ordinary file" in crisp("diagnose", pipe).err
    binary = tmp_path / "binary.csv"
    binary.write_bytes(bytes(range(256)) * 20)
    done = crisp("diagnose", binary)
    assert done.code == 2 and "not recognised as a log" in done.err
    assert not list(tmp_path.glob("*.part"))
