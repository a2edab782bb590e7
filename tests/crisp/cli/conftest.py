"""A small trace, and the command line as a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from crisp.cli.main import main
from tests.crisp.cli.toy import toy_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A file with the toy trace, alone in a folder."""
    path = tmp_path / "traces" / "toy.trace.safetensors"
    path.parent.mkdir()
    toy_trace().save(path)
    return path


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def crisp(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Done]:
    """Run a command line in this process, on one core."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})

    def call(*arguments: object) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        told = capsys.readouterr()
        return Done(int(end.value.code or 0), told.out, told.err)

    return call
