"""Whether the fast engine was compiled here before, so that nobody has to wait for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def compiled_before() -> bool:
    """Return whether what numba left on the disk is not older than the source."""
    from crisp.sim.fast import streams  # imports numba, for which others need not wait

    source, kernel = Path(streams.__file__), streams.run_batch
    compiled: Any = kernel
    folder = compiled.stats.cache_path  # None: no folder can be written to
    if folder is None:
        return False
    since = source.stat().st_mtime
    return any(file.stat().st_mtime >= since for file in Path(folder).glob(f"{source.stem}.*.nbi"))
