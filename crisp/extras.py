"""The import of modules that come with optional extras."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from crisp.errors import CrispError


def import_extra(module: str, extra: str = "hf") -> Any:
    """Return the module; CrispError names the extra when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        if (
            find_spec(top) is not None
        ):  # installed, but broken: one of its libraries cannot be mapped, say
            raise CrispError(f"{top} cannot be loaded: {error}") from error
        raise CrispError(
            f"{top} is needed and not installed: pip install '.[{extra}]' in the checkout ({error})"
        ) from error
