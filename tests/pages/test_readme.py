"""Every command and program that the README prints runs, and prints what stands there."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest

from crisp.cli.main import main
from crisp.trace import DECODE, RoutingTrace
from crisp.trace.bundled import bundled_traces

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def sessions() -> list[tuple[str, str]]:
    """(command, output) of all consoles."""
    blocks = "".join(re.findall(r"```console\n(.*?)```", README, re.DOTALL))
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", blocks, re.MULTILINE)


@pytest.mark.seconds
def test_the_consoles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = sessions()
    assert len(done) == 5
    for command, expected in done:
        command = command.replace("make demo", "crisp demo")  # what it runs, once installed
        program, *arguments = shlex.split(command)
        assert program == "crisp"
        with pytest.raises(SystemExit) as end:
            main(arguments)
        out, err = capsys.readouterr()
        assert (end.value.code or 0, err) == (0, "")
        same = doctest.OutputChecker().check_output(expected, out, doctest.ELLIPSIS)
        assert same, f"{command} printed:\n{out}"
    for name in ("out/throughput.png", "out/token.png", "step.png"):
        assert (tmp_path / name).read_bytes()[1:4] == b"PNG"


def test_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (expected,) = re.findall(r"  # (.*tokens/s.*)", program)
    exec(program, {})
    assert capsys.readouterr().out == f"{expected}\n"


def test_links_lead_somewhere() -> None:
    root = Path(__file__).resolve().parents[2]
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("examples/*.md")]
    for page in pages:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            place = (page.parent / link).resolve()
            inside = root / "crisp" / place.relative_to(root)  # sim and hw, unpacked from an sdist
            assert place.exists() or inside.exists(), f"{page.name}: {link}"


def test_the_page_of_traces_says_what_they_hold() -> None:
    root = Path(__file__).parents[2] / "traces"
    page = (root / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| ([\d,]+) \| ([\d,]+) \|.*`(\w{64})` \|$", page, re.M)
    assert {name for name, *_ in rows} == set(bundled_traces())
    for name, held, generated, digest in rows:
        trace = RoutingTrace.load(bundled_traces()[name])
        found = f"{trace.rows:,}", f"{int((trace.phase == DECODE).sum()):,}", trace.digest()
        assert found == (held, generated, digest), name
