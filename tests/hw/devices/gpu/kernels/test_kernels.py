"""The kernels, interpreted: in processes of their own, for triton interprets all or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("interpreted.py")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    "asked", ["not mistakes", pytest.param("mistakes", marks=pytest.mark.slow)]
)
def test_in_the_interpreter(asked: str, pytestconfig: pytest.Config) -> None:
    """See interpreted.py: every form against double precision; and planted mistakes."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", asked, "-p", "no:cacheprovider", str(FILE)],
        cwd=pytestconfig.rootpath,
        env=outside | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
