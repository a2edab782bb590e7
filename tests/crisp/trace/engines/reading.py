"""Routing to write in the layouts of engines, and the refusal of files that are broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.trace.importing.engines import EngineLog, ExpertCounts, read_log


class Routing(NamedTuple):
    experts: np.ndarray  # [tokens, layers, k]
    weights: np.ndarray  # [tokens, layers, k], falling


def routing(
    tokens: int = 7, layers: int = 3, k: int = 2, n_experts: int = 16, seed: int = 0
) -> Routing:
    """Draw distinct experts, by falling weight."""
    random = np.random.default_rng(seed)
    ids = np.tile(np.arange(n_experts), (tokens, layers, 1))
    experts = random.permuted(ids, axis=2)[..., :k]
    weights = -np.sort(-random.integers(1, 1000, (tokens, layers, k)) / 1000, axis=2)
    return Routing(experts, weights)


def read(path: Path | list[Path], engine: str, **sizes: Any) -> EngineLog:
    """Read a log that is recognised as one of ``engine``."""
    paths = path if isinstance(path, list) else [path]
    log = read_log(paths, **sizes)
    assert log.engine == engine
    assert isinstance(log, EngineLog)
    again = read_log(paths, engine, **sizes)
    assert isinstance(again, EngineLog)
    assert again.trace.digest() == log.trace.digest()
    return log


def counts(path: Path | list[Path], engine: str, **sizes: Any) -> ExpertCounts:
    log = read_log(path if isinstance(path, list) else [path], **sizes)
    assert log.engine == engine
    assert isinstance(log, ExpertCounts)
    return log


def refusal(path: Path | list[Path], engine: str | None = None, **sizes: Any) -> str:
    """Return the one line about a log that is refused, without the file it names."""
    paths = path if isinstance(path, list) else [path]
    with pytest.raises(CrispError) as caught:
        read_log(paths, engine, **({"n_experts": 16} | sizes))
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 500
    return line.replace(str(paths[0]), "FILE")
