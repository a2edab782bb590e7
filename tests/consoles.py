"""Consoles in pages: every command runs, in its order, and prints what stands there."""

from __future__ import annotations

import doctest
import re
import shlex

import pytest

from crisp.cli.main import main

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def check_console(page: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run the commands of a page's only console here; what each printed."""
    (console,) = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    printed = []
    for command, expected in re.findall(r"^\$ crisp (.*)\n((?:(?!\$ ).*\n)*)", console, re.M):
        with pytest.raises(SystemExit) as end:
            main(shlex.split(command))
        out, err = capsys.readouterr()
        if command.startswith("energy "):  # standard output is what it runs'
            out, err = err, out
        assert (end.value.code or 0, err) == (0, ""), command
        same = doctest.OutputChecker().check_output(expected, out, FLAGS)
        assert same, f"{command} printed:\n{out}"
        printed.append(out)
    return printed
