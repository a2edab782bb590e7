"""What was compiled before is used again, or forgotten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODULE = """
from typing import NamedTuple
from crisp.sim.compiling import kept

class {name}(NamedTuple):
    x: int

@kept
def double(pair):
    return 2 * pair.x

if __name__ == "__main__":
    import module
    print(module.double(module.{name}(21)))
"""


def test_types_that_were_renamed_are_no_fault(tmp_path: Path) -> None:
    """Numba's own index of compiled functions names the types that they were compiled for."""
    module = tmp_path / "module.py"
    for name in ("Before", "After"):
        module.write_text(MODULE.format(name=name))
        done = subprocess.run([sys.executable, module], capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("42\n", "")
    assert list((tmp_path / "__pycache__").glob("module.double-*.nbi"))
