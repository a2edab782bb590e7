"""What was measured elsewhere and comes along: see the generators that each function names."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


def quality() -> dict[str, Any]:
    """What widths cost in quality on the small models, by model (``make quality``)."""
    models: dict[str, Any] = _read("quality")["models"]
    return models


def routing() -> dict[str, Any]:
    """Statistics of a real Mixtral-8x7B's routing (benchmarks/reproduction.py)."""
    return _read("routing")


def host() -> dict[str, Any]:
    """What the host spends on deciding, us a token (benchmarks/reproduction.py)."""
    return _read("host")


@cache
def _read(name: str) -> dict[str, Any]:
    text = (files("crisp.reproduce") / "data" / f"{name}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
