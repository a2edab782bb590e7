"""A command run in a process of its own, whose anonymous memory is looked at all the time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_CHILD = """
import sys, threading, time
from pathlib import Path

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024

import crisp.cli.commands.run.replay, crisp.hw.devices.cpu.device, crisp.hw.replay
import crisp.cli.output.run_files, crisp.cli.output.run_tables, crisp.run.setup
import crisp.sim.simulate, torch, pandas, xxhash
{more}
base, most = anonymous(), [0]

def sample():
    while True:
        most[0] = max(most[0], anonymous())
        time.sleep(0.005)

threading.Thread(target=sample, daemon=True).start()
from crisp.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("bytes", most[0] - base, file=sys.stderr)
"""


def peak(*arguments: object, more: str = "") -> int:
    """The most anonymous memory (RssAnon, every 5 ms) that `crisp ARGUMENTS` held above what its
    imports do, in bytes; more: what it imports beside the replay's.
    """
    done = subprocess.run(
        [sys.executable, "-c", _CHILD.format(more=more), *map(str, arguments)],
        capture_output=True, text=True, timeout=180, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stderr.rsplit("bytes ", 1)[1].split()[0])
