"""The misses that libCacheSim counts; it is a tool of tests (GPL), and may not be there."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

NAMES = {"fifo": "FIFO", "lru": "LRU", "lfu-in-cache": "LFU", "belady-forced": "Belady"}
# A request as its readers of traces with the future in them take it.
_REQUEST = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
_NEVER = -1


def misses(cache: str, accesses: npt.NDArray[np.int16], room: Sequence[int]) -> dict[str, Any]:
    """Of all layers together, and by which version; nothing where it is not installed.

    accesses: experts [accesses, layers]; room: experts of each layer.
    """
    try:
        import libcachesim
    except ImportError:
        return {}
    kind, found = getattr(libcachesim, NAMES[cache]), 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "accesses.bin"
        for own, places in zip(accesses.T, room, strict=True):
            if not places:
                found += len(own)
                continue
            _requests(own).tofile(file)
            reader = libcachesim.TraceReader(str(file), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
            share, _ = kind(cache_size=places).process_trace(reader)
            found += round(share * len(own))
    return {"libcachesim": found, "libcachesim_version": metadata.version("libcachesim")}


def _requests(accesses: npt.NDArray[np.int16]) -> npt.NDArray[Any]:
    """Each with the moment of the next one of the same expert: what Belady's rule asks for."""
    made = np.zeros(len(accesses), _REQUEST)
    made["time"], made["size"], made["next"] = np.arange(len(accesses)), 1, _NEVER
    made["object"] = accesses
    by_expert = np.lexsort((made["time"], accesses))
    again = accesses[by_expert[:-1]] == accesses[by_expert[1:]]
    made["next"][by_expert[:-1][again]] = by_expert[1:][again]
    return made
