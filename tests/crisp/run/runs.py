"""A run with all that a run file must have, to be changed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

from crisp.model.builtin import CONFIGS
from crisp.model.spec import ModelSpec
from crisp.run.result import Run
from crisp.run.schema import COUNTS, NAMED_BY_PHASE, NUMBERS

SPEC = replace(
    ModelSpec.from_config(CONFIGS["mixtral-8x7b"], "moe").first_layers(6), bits=Fraction(17, 4)
)


def whole(settings: dict[str, Any] | None = None, **metrics: float | None) -> Run:
    """A simulated run of 1000 rows; ``settings`` take the place of some."""
    values: dict[str, Any] = dict.fromkeys(COUNTS, 1) | dict.fromkeys((*NUMBERS, *NAMED_BY_PHASE))
    own: dict[str, Any] = {
        "engine": "simpy",
        "trace": {"rows": 1000},
        "policy": {
            "name": "lru",
            "width": "full",
            "order": "fifo",
            "cache": "lru",
            "scope": "layer",
            "unit": "expert",
            "prefetch": "none",
        },
        "budget": {"asked": "10%"},
        "hardware": {"name": "box", "kind": "discrete"},
        "model": SPEC.to_dict(),
        "phase": "decode",
        "batch": 1,
        "granularity": "expert",
    }
    return sealed(Run(own | (settings or {}), values | metrics, {}, {}))


def sealed(run: Run) -> Run:
    """The run with the hash of its settings, as if it had been made with them."""
    text = json.dumps(run.settings, sort_keys=True).encode()
    provenance = run.provenance | {"inputs_sha256": hashlib.sha256(text).hexdigest()}
    return replace(run, provenance=provenance)
