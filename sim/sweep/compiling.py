"""Whether the fast replay was compiled here before, so that nobody has to wait for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def compiled_before() -> bool:
    """As numba sees it: what it left on the disk is not older than the source."""
    from crisp.sim.fast import streams  # imports numba, for which others need not wait

    source, run = Path(streams.__file__), streams.run
    made: Any = run
    folder = made.stats.cache_path  # None: no folder can be written to
    if folder is None:
        return False
    since = source.stat().st_mtime
    return any(file.stat().st_mtime >= since for file in Path(folder).glob(f"{source.stem}.*.nbi"))
