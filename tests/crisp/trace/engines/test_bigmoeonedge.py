"""Route traces of BigMoeOnEdge: what is read, and what is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.trace.importing.engines import EngineLog, read_log
from tests.crisp.diagnose.route_log import HEAD, write_log

PROMPT = [[[3, 1], []], [[1, 2], [4, 0]]]
DECODED = [[[2, 3], [0, 1]], [[5, 3], [0, 4]]]


def read(path: Path, **known: int) -> EngineLog:
    log = read_log([path], **known)
    assert isinstance(log, EngineLog)
    return log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_log(tmp_path / "toy.route.csv", PROMPT, DECODED, (100, 90), 6)


def test_what_is_read(path: Path) -> None:
    log = read(path)
    assert log.engine == "bigmoeonedge" and log.expert_bytes == (100, 90)
    trace = log.trace
    assert trace.experts.tolist() == [
        [[3, 1], [-1, -1]], [[1, 2], [4, 0]], [[2, 3], [0, 1]], [[5, 3], [0, 4]],
    ]  # fmt: skip
    assert trace.phase.tolist() == [0, 0, 1, 1] and trace.position.tolist() == [0, 1, 2, 3]
    assert trace.weights is not None and trace.weights[0].tolist() == [[0.5, 0.25], [0, 0]]
    header = trace.header
    assert (header.n_experts, header.top_k, header.ordered) == (6, 2, True)
    assert header.model == "toy-Q4.gguf" and "arch toy" in (header.note or "")
    assert log.absent == 1
    assert log.notes == (
        "1 (token, layer)s have no record (1 of prompt tokens, whose last layer is evaluated for "
        "the last token only): absent, not decoded",
    )


def test_each_turn_is_a_sequence(path: Path) -> None:
    text = path.read_text()
    second = "\n".join(
        line.replace("0,", "1,", 1) for line in text.splitlines() if line.startswith("0,")
    )
    path.write_text(text + second + "\n")
    trace = read(path).trace
    assert trace.sequence.tolist() == [0] * 4 + [1] * 4
    assert trace.position.tolist() == [0, 1, 2, 3] * 2


def test_dropped_experts_are_left_out(path: Path) -> None:
    lines = path.read_text().splitlines()
    head = lines.index(HEAD)
    lines[head] += ",dropped"
    lines[head + 1 :] = [f"{line},{int(n == 0)}" for n, line in enumerate(lines[head + 1 :])]
    path.write_text("\n".join(lines) + "\n")
    log = read(path)
    assert log.trace.experts[0, 0].tolist() == [1, -1]
    assert log.notes[0] == "1 experts that the engine dropped are left out"


def test_unknown_weights_and_rising_ones(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace("0.5,", "nan,"))
    log = read(path)
    assert log.trace.weights is None and log.trace.header.ordered
    path.write_text(text.replace("0.5,", "0.125,"))
    log = read(path)
    assert not log.trace.header.ordered
    assert log.notes[0] == "router weights do not fall with the slot: the slots' order is kept"


def test_columns_go_by_name(path: Path) -> None:
    lines = path.read_text().splitlines()
    head = lines.index(HEAD)
    names = HEAD.split(",")
    order = ["expert_bytes", "more", *reversed(names[:-1])]
    rows = [
        dict(zip([*names, "more"], [*line.split(","), "x"], strict=True)) for line in lines[head:]
    ]
    rows[0]["more"] = "more"
    table = [",".join(row[name] for name in order) for row in rows]
    expected = read(path).trace.experts
    path.write_text("\n".join([*lines[:head], *table]) + "\n")
    assert (read(path).trace.experts == expected).all()


def _line(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


FIRST = "0,0,0,0,0,3,0.5,0,100"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_line(FIRST, "0,0,0,0,0,6,0.5,0,100"), "line 6: expert 6; expected 0 to 5"),
        (_line(FIRST, "0,0,0,0,0,-3,0.5,0,100"), "line 6: expert -3; expected 0 to 5"),
        (_line(FIRST, "0,0,0,0,2,3,0.5,0,100"), "line 6: slot 2; expected 0 to 1"),
        (_line(FIRST, "0,0,0,2,0,3,0.5,0,100"), "line 6: layer 2; expected 0 to 1"),
        (_line(FIRST, "0,2,0,0,0,3,0.5,0,100"), "line 6: phase 2; expected 0 to 1"),
        (_line(FIRST, "-1,0,0,0,0,3,0.5,0,100"), "line 6: turn -1; expected 0 to 2147483647"),
        (_line(FIRST, "0,0,3000000000,0,0,3,0.5,0,100"), "line 6: step 3000000000; expected 0 to"),
        (_line(FIRST, "0,0,0,0,0,3,0.5,0,-100"), "line 6: expert_bytes -100; expected 0 or the"),
        (_line(FIRST, "0,0,0,0,0,3,0.5,0,10"), "line 6: expert_bytes 10; expected 0 or the 100 of"),
        (_line(FIRST, "0,1,0,0,0,3,0.5,0,100"), "a token is prefill in one layer and decode in"),
        (_line(FIRST, "0,0,0,0,1,3,0.5,0,100"), "layer 0 has slot 1 twice"),
        (_line(FIRST, "0,0,0,0,0,1,0.5,0,100"), "experts [1, 1]; 1 twice"),
        (_line(FIRST, "0,0,0,0,0,3,-0.5,0,100"), "weight -0.5 found"),
        (_line(FIRST, "0,0,0,0,0,3,inf,0,100"), "weight inf found"),
        (_line(FIRST, "0,0,9,0,0,3,0.5,0,100"), "positions of a sequence must have no gaps"),
        (_line(FIRST, "0,0,0,0,0"), "Expected 9 columns, got 5"),
        (_line(FIRST, "0,0,0,0,0,x,0.5,0,100"), "invalid value 'x'"),
        (_line(FIRST, "0,0,0,0,0,99999999999999999999,0.5,0,100"), "invalid value '9999999999999"),
        (_line("layer=1 expert_bytes=90", "layer=1 expert_bytes=-9"), "'# layer=1 expert_bytes=-9"),
        (_line("layer=1", "layer=7"), "expected a layer below 2 and its expert_bytes"),
        (_line("n_expert=6", "n_expert=99999"), "n_expert 99999 found; expected 1 to 32767"),
        (_line("n_layer=2", "n_layer=0"), "n_layer 0 found; expected 1 to 4096"),
        (_line("n_expert_used=2", "n_expert_used=7"), "n_expert_used 7 found; expected 1 to 6"),
        (_line("n_layer=2", "n_layer=99999999"), "no line '# model=.. arch=.. n_layer=.."),
        (_line("v1", "v9"), "'# route_trace v9' found; this reads '# route_trace v1'"),
        (_line("expert,", "ekspert,"), "no column expert, or several; found turn, ph"),
        (_line("slot,", "expert,"), "no column slot, expert, or several; found turn, phase, step"),
        (lambda text: text[: text.index(HEAD)], "mpty CSV file"),
        (lambda text: text[: text.index(HEAD) + len(HEAD) + 1], "holds no routing"),
        (lambda text: text[:-4], "Expected 9 columns, got 8"),
        (lambda text: "# route_trace v1\n", "no line '# model=.. arch=.. n_layer=.."),
    ],
)  # fmt: skip
def test_what_is_refused(path: Path, change: Callable[[str], str], message: str) -> None:
    path.write_text(change(path.read_text()))
    with pytest.raises(CrispError) as error:
        read(path)
    text = str(error.value)
    assert message in text and text.startswith(f"{path}: ") and "\n" not in text
    assert len(text) < 400


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"# route_trace v1\n\xff\xfe\0\0" * 50])
def test_what_is_no_log(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "no.csv"
    path.write_bytes(content)
    with pytest.raises(CrispError) as error:
        read_log([path], "bigmoeonedge")
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_model_of_another_size(path: Path) -> None:
    with pytest.raises(CrispError, match="a model of 6 experts; 8 were expected"):
        read(path, n_experts=8)
    with pytest.raises(CrispError, match="a second file; a BigMoeOnEdge route trace is one file"):
        read_log([path, path], "bigmoeonedge")


def test_a_cut_token_is_absent_not_decoded(path: Path) -> None:
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-2]) + "\n")  # without the last layer of the last token
    log = read(path)
    assert log.absent == 2 and np.all(log.trace.experts[-1, 1] == -1)


@pytest.mark.seconds
def test_changed_bytes_give_a_valid_trace_or_one_line(path: Path) -> None:
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    digits, refused = list(b"0123456789,.-"), 0
    for _ in range(300):
        content = bytearray(whole)
        for place in rng.integers(len(content), size=rng.integers(1, 4)):
            content[place] = rng.integers(256) if rng.random() < 0.3 else rng.choice(digits)
        path.write_bytes(
            content[: rng.integers(1, len(content) + 1)] if rng.random() < 0.3 else content
        )
        try:
            read_log([path], "bigmoeonedge")
        except CrispError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 500, str(error)
    assert 100 < refused < 300
