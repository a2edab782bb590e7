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
    """Return libCacheSim's misses of all layers together, and its version; empty if not installed.

    accesses: experts [accesses, layers]; room: experts of each layer.
    """
    try:
        import libcachesim
    except ImportError:
        return {}
    kind, missed = getattr(libcachesim, NAMES[cache]), 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "accesses.bin"
        for layer_accesses, places in zip(accesses.T, room, strict=True):
            if not places:
                missed += len(layer_accesses)
                continue
            _requests(layer_accesses).tofile(file)
            reader = libcachesim.TraceReader(str(file), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
            share, _ = kind(cache_size=places).process_trace(reader)
            missed += round(share * len(layer_accesses))
    return {"libcachesim": missed, "libcachesim_version": metadata.version("libcachesim")}


def _requests(accesses: npt.NDArray[np.int16]) -> npt.NDArray[Any]:
    """Return requests [accesses], each with the time of the next one of the same expert."""
    requests = np.zeros(len(accesses), _REQUEST)
    requests["time"], requests["size"], requests["next"] = np.arange(len(accesses)), 1, _NEVER
    requests["object"] = accesses
    by_expert = np.lexsort((requests["time"], accesses))
    again = accesses[by_expert[:-1]] == accesses[by_expert[1:]]
    requests["next"][by_expert[:-1][again]] = by_expert[1:][again]
    return requests
