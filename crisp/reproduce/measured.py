"""Measured figures that come with the package; each function names their generator."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


def quality_figures() -> dict[str, Any]:
    """Return what widths cost in quality on the small models, by model (``make quality``)."""
    models: dict[str, Any] = _read("quality")["models"]
    return models


def routing_statistics() -> dict[str, Any]:
    """Return statistics of a real Mixtral-8x7B's routing (benchmarks/reproduction.py)."""
    return _read("routing")


def host_figures() -> dict[str, Any]:
    """Return the time the host spends on decisions, us a token (benchmarks/reproduction.py)."""
    return _read("host")


@cache
def _read(name: str) -> dict[str, Any]:
    """Return the content of a file in ``data``."""
    text = (files("crisp.reproduce") / "data" / f"{name}.json").read_text(encoding="utf-8")
    figures: dict[str, Any] = json.loads(text)
    return figures
