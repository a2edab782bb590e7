"""Print what jtop's client reads, as JSON lines: the child process of `crisp.hw.telemetry.jtop`.

Only here is jetson-stats imported: it sets multiprocessing to fork, which a process that uses CUDA
does not survive, its client may hang, and its licence is the AGPL. Imports nothing of CRISP.

Lines: ``{"client": VERSION}`` before the service is asked; ``{"power": ..., "interval": SECONDS}``
for every new value of the service; ``{"error": TEXT}`` and the end.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from typing import Any, TextIO

STALE = 4  # intervals without a new value: the service stands still


def main(interval: float) -> None:
    """Print lines until the service fails, or the parent process has ended."""
    # what the client prints must not get between the lines
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _serve(interval, out)
    except Exception as error:  # whatever it is, the parent gets it
        _say(out, {"error": str(error) or type(error).__name__, "kind": type(error).__name__})
    os._exit(0)  # its threads may hang


def _serve(interval: float, out: TextIO) -> None:
    """Print a line for every new value, until the client fails."""
    jtop = importlib.import_module("jtop")
    _say(out, {"client": jtop.__version__})
    client = jtop.jtop(interval=interval)
    seen, since = None, time.monotonic()

    def observe(_: Any) -> None:
        # The client repeats its last values while the service publishes none; the service's uptime
        # among them shows whether they are new.
        nonlocal seen, since
        if client.uptime != seen:
            seen, since = client.uptime, time.monotonic()
            _say(out, {"power": client.power, "interval": max(interval, client.interval)})

    client.attach(observe)
    client.start()  # hangs where the service is mute
    while client.ok(spin=True):  # raises what befell the client's thread
        time.sleep(interval / 10)
        silent = time.monotonic() - since
        if silent > STALE * max(interval, client.interval):
            raise TimeoutError(f"no new values for {silent:.1f} s")
    raise EOFError("the client ended")


def _say(out: TextIO, line: dict[str, Any]) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()


def _end_with_parent() -> None:
    sys.stdin.read()  # ends with whoever holds the other end
    os._exit(0)


if __name__ == "__main__":
    main(float(sys.argv[1]))
