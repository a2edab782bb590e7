"""Import modules of optional extras, or say which extra is missing."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from crisp.errors import CrispError


def need(module: str) -> Any:
    """A module of the extra ``hf``; CrispError names the extra when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        if find_spec(top) is not None:  # a library of it does not fit into memory, say
            raise CrispError(f"{top} cannot be loaded: {error}") from error
        raise CrispError(
            f"{top} is needed and not installed: pip install '.[hf]' in the checkout ({error})"
        ) from error
