"""What ``crisp diagnose`` prints on the three real logs."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from benchmarks.logs.published import MIB, MODELS, read_metrics
from crisp.cli.main import main

MACHINE = Path(__file__).with_name("phone.toml")


def diagnoses(data: Path) -> list[dict[str, str]]:
    """Return the command that a user would type in the log's folder, and what it prints."""
    shown = []
    for model in MODELS:
        budget = f"{read_metrics(data, model).budget_bytes // MIB}MiB"
        log = model.log(data)
        options = ["--budget", budget, "--hardware", str(MACHINE)]
        command = f"crisp diagnose {log.name} --budget {budget} --hardware {MACHINE.name}"
        shown.append({"model": model.title, "command": command, "text": _run(log, options)})
    return shown


def _run(log: Path, options: list[str]) -> str:
    """Return what the command prints; its end is SystemExit, as of every command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(["diagnose", str(log), *options])
    return out.getvalue().rstrip("\n")
