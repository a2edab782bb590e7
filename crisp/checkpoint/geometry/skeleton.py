"""What transformers knows of a family: its config's defaults, and its model without weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from crisp.checkpoint.files import TensorEntry
from crisp.checkpoint.geometry.tensors import TensorGeometry, tensor_geometry
from crisp.model.layouts import COMMON


def default_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a config with transformers' defaults for the keys it omits, of its language model.

    None: transformers is not there, does not know the family or refuses the config. What the
    config itself says of dtype and quantisation stays as it is said.
    """
    whole = _config_object(config)
    if whole is None:
        return None
    inner = whole.get_text_config()
    full: dict[str, Any] = {**inner.to_dict(), "model_type": inner.model_type}
    for key in COMMON:
        full.pop(key, None)
        own = config.get(key)
        if own is None and isinstance(config.get("text_config"), Mapping):
            own = config["text_config"].get(key)
        if own is not None:
            full[key] = own
    return full


def skeleton_geometry(path: Path, config: Mapping[str, Any]) -> TensorGeometry | None:
    """Return the geometry of transformers' own model of a config, on torch's meta device.

    None: torch or transformers is not there, or they cannot make it.
    """
    whole = _config_object(config) if find_spec("torch") is not None else None
    if whole is None:
        return None
    import torch
    import transformers

    inner = whole.get_text_config()
    with torch.device("meta"):
        for auto, part in (
            (transformers.AutoModelForCausalLM, inner),
            (transformers.AutoModel, inner),
            (transformers.AutoModelForImageTextToText, whole),
        ):
            try:
                model = auto.from_config(part, trust_remote_code=False)
            except Exception:
                continue
            entries = [
                TensorEntry(name, path.name, "BF16", tuple(x.shape), 0, 2 * x.numel())
                for name, x in model.state_dict().items()
            ]
            return tensor_geometry(entries, inner.num_hidden_layers, inner.hidden_size)
    return None


def _config_object(config: Mapping[str, Any]) -> Any:
    """Return transformers' config, which has one language model; None: see `default_config`."""
    if find_spec("transformers") is None:
        return None
    import transformers

    log = logging.getLogger("transformers")
    level, name = log.level, config.get("model_type")
    log.setLevel(logging.ERROR)
    try:
        values = {key: value for key, value in config.items() if key not in ("model_type", *COMMON)}
        whole = transformers.AutoConfig.for_model(name, **values)
        whole.get_text_config()
        return whole
    except Exception:  # of any family's code: it is not understood
        return None
    finally:
        log.setLevel(level)
