"""A transformers checkpoint, loaded with its tokenizer, or one line about what is wrong with it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crisp.adapter import Experts, layout
from crisp.checkpoint.deepseek import register
from crisp.errors import CrispError
from crisp.extras import need
from crisp.model.quantization import dequantise, quantise
from crisp.model.spec import ModelSpec


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model ready to run, and what a trace should say about it.

    ``name`` is the folder's own name, or the hub's; ``spec`` is None for a family whose geometry
    CRISP does not read; ``how`` says type, device and versions.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str | None
    spec: ModelSpec | None
    how: str


def load(name: str) -> Loaded:
    """The MoE language model in the folder ``name``, or of that name on the hub, in the type it was
    published in, on the GPU if there is one.

    Raises CrispError for what is not there, lacks weights or a tokenizer, holds weights that are
    none of the model's, or is not understood (see ``crisp.adapter.layout``); the last is found
    before any weight is read.
    """
    torch, transformers = need("torch"), need("transformers")
    folder, auto = Path(name), transformers.AutoModelForCausalLM
    config = load_config(name)
    with _quiet(transformers):
        with one_line(name, f"model_type {config.model_type}"), torch.device("meta"):
            layout(_skeleton(auto, config))
        tokenizer = load_tokenizer(name)
        with one_line(name, "its weights"):
            model, info = _weights(name, auto)
    for keys, what in (
        ("missing_keys", "lacks {} of the model's weights"),
        ("unexpected_keys", "holds {} weights that the model does not have"),
    ):
        if info[keys]:
            raise CrispError(f"{name}: {what.format(len(info[keys]))}, such as {min(info[keys])}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Loaded(
        model=model.to(device).eval(),
        tokenizer=tokenizer,
        name=folder.resolve().name if folder.is_dir() else name,
        revision=getattr(config, "_commit_hash", None),
        spec=_spec(name, transformers),
        how=f"{str(model.dtype).removeprefix('torch.')} on {device}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}",
    )


def in_float32(loaded: Loaded) -> Loaded:
    """On a CPU, the model in float32, converted in place: there half precision is slow, and its
    rounding would drown small losses. Elsewhere as it was published.
    """
    if loaded.model.device.type != "cpu" or loaded.model.dtype == need("torch").float32:
        return loaded
    published, on, where = loaded.how.partition(" on ")
    how = f"float32 (published in {published}){on}{where}"
    return dataclasses.replace(loaded, model=loaded.model.float(), how=how)


def in_groups(loaded: Loaded, dtype: str) -> Loaded:
    """With the routed experts' weights that a store of ``dtype`` holds (int8 or int4), put into the
    model in place; it computes in its own type as before.

    Raises CrispError for weights too large for it.
    """
    torch = need("torch")
    with torch.no_grad():
        for layer in layout(loaded.model).layers:
            experts = Experts.of(layer)
            for expert in range(experts.n_experts):
                for part in experts.neurons(expert):
                    q, scales = quantise(part.float().cpu().numpy(), dtype)
                    if not np.isfinite(scales).all():
                        raise CrispError(
                            f"{layer.name}: expert {expert} has weights too large for {dtype}"
                        )
                    part.copy_(torch.from_numpy(dequantise(q, scales)))
            for bias in experts.biases():
                bias.copy_(bias.half())
    return dataclasses.replace(loaded, how=f"{loaded.how}, experts in {dtype}")


def load_config(name: str | Path) -> Any:
    """The transformers config in the folder ``name``, or of that name on the hub.

    Families that transformers lacks and CRISP has are made known to it.
    """
    transformers = need("transformers")
    folder, name = Path(name), str(name)
    if not folder.is_dir() and (name.count("/") != 1 or folder.parent.is_dir() or name[0] in "/~"):
        raise CrispError(f"{name}: is no folder; one with a transformers checkpoint was expected")
    register()
    what = "its config" if folder.is_dir() else "no folder; asked the hub"
    with _quiet(transformers), one_line(name, what):
        return transformers.AutoConfig.from_pretrained(name)


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer beside a model; CrispError if there is none."""
    transformers = need("transformers")
    with _quiet(transformers), one_line(str(name), "its tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(name)


def _skeleton(auto: Any, config: Any) -> Any:
    try:
        return auto.from_config(config)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise CrispError(
            f"model_type {config.model_type} is no decoder-only language model of transformers"
        ) from error


def _weights(name: str, auto: Any) -> tuple[Any, dict[str, Any]]:
    try:
        model, info = auto.from_pretrained(name, dtype="auto", output_loading_info=True)
    except RuntimeError as error:  # says "see the above report", and is of no other use
        raise CrispError(
            f"{name}: the weights do not fit the config: some are missing or of another shape"
        ) from error
    return model, info


def _spec(name: str, transformers: Any) -> ModelSpec | None:
    folder = Path(name)
    file = folder / "config.json"
    if not folder.is_dir():
        file = Path(transformers.utils.cached_file(name, "config.json"))
    try:
        return ModelSpec.from_config(file, folder.resolve().name if folder.is_dir() else name)
    except CrispError:
        return None


@contextmanager
def one_line(name: str, what: str) -> Iterator[None]:
    """Whatever transformers raises about a checkpoint, as one line that names it."""
    try:
        yield
    except CrispError as error:
        raise CrispError(f"{name}: {error}" if name not in str(error) else str(error)) from error
    except MemoryError:
        raise
    except Exception as error:  # OSError, ValueError, KeyError, SafetensorError: no common base
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = reason if len(reason) <= 160 else reason[:157] + "..."
        raise CrispError(f"{name}: cannot be used ({what}): {reason}") from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars and no advice of transformers and the hub: what matters is checked here."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    log.set_verbosity_error()
    log.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        hub.setLevel(level)
        if bars:
            log.enable_progress_bar()
