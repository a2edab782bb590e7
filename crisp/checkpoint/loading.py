"""Loading of a transformers checkpoint with its tokenizer; errors are one line each."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter import Experts, expert_layout
from crisp.checkpoint.deepseek import register
from crisp.checkpoint.filling import decoded_model
from crisp.checkpoint.gguf import refuse_gguf
from crisp.checkpoint.quantised import read_quantization
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.model.quantization import dequantize, quantize
from crisp.model.spec import ModelSpec


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run, with what a trace records about it."""

    model: Any
    tokenizer: Any
    name: str  # of the folder, or on the hub
    revision: str | None  # of the hub's repository
    spec: ModelSpec | None  # None for a family whose geometry CRISP does not read
    how: str  # type, device and versions


def load_model(name: str) -> LoadedModel:
    """Load the MoE language model in the folder ``name``, or of that name on the hub.

    It keeps the type it was published in, and is put on the GPU if there is one. Raises CrispError
    for a model that is not there, lacks weights or a tokenizer, holds weights that the config does
    not know, or is not understood (see `crisp.adapter.expert_layout`); the last is found before any
    weight is read.
    """
    torch, transformers = import_extra("torch"), import_extra("transformers")
    folder, auto = Path(name), transformers.AutoModelForCausalLM
    refuse_gguf(folder)
    config = load_config(name)
    with _quiet(transformers):
        with one_line_errors(name, "its config"):
            expert_layout(model_without_weights(name, config))
        tokenizer = load_tokenizer(name)
        with one_line_errors(name, "its weights"):
            decoded = folder.is_dir() and read_quantization(folder) is not None
            model, method = (
                decoded_model(folder, config, model_without_weights)
                if decoded
                else (_whole(name, auto), None)
            )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return LoadedModel(
        model=model.to(device).eval(),
        tokenizer=tokenizer,
        name=folder.resolve().name if folder.is_dir() else name,
        revision=getattr(config, "_commit_hash", None),
        spec=_spec(name, transformers),
        how=f"{str(model.dtype).removeprefix('torch.')} on {device}, "
        f"{'' if method is None else f'decoded from {method}, '}"
        f"torch {torch.__version__}, transformers {transformers.__version__}",
    )


def to_float32(loaded: LoadedModel) -> LoadedModel:
    """Convert a model on a CPU to float32, in place; elsewhere it stays as it was published.

    On a CPU half precision is slow, and its rounding would hide small losses.
    """
    if loaded.model.device.type != "cpu" or loaded.model.dtype == import_extra("torch").float32:
        return loaded
    published, on, device = loaded.how.partition(" on ")
    how = f"float32 (published in {published}){on}{device}"
    return dataclasses.replace(loaded, model=loaded.model.float(), how=how)


def quantize_experts(
    loaded: LoadedModel, dtype: str, moments: Mapping[int, NDArray[np.float32]] | None = None
) -> LoadedModel:
    """Round the routed experts' weights, in place, to what a store of ``dtype`` holds.

    dtype: int8 or int4. moments: [d_model] by MoE layer, of the experts' input; with them int4's
    scales are searched. The model computes in its own type as before. Raises CrispError for weights
    too large for ``dtype``.
    """
    torch = import_extra("torch")
    with torch.no_grad():
        for layer in expert_layout(loaded.model).layers:
            experts = Experts.of(layer)
            for expert in range(experts.n_experts):
                # views [..., d_ff, d_model]; of the down one every output counts the same
                own = None if moments is None else moments[layer.index]
                equal = None if own is None else np.ones_like(own)
                for part, counts in zip(experts.neurons(expert), (own, equal), strict=True):
                    q, scales = quantize(part.float().cpu().numpy(), dtype, counts)
                    if not np.isfinite(scales).all():
                        raise CrispError(
                            f"{layer.name}: expert {expert} has weights too large for {dtype}"
                        )
                    part.copy_(torch.from_numpy(dequantize(q, scales)))
            for bias in experts.biases():
                bias.copy_(bias.half())
    searched = ", scales searched" if moments is not None and dtype == "int4" else ""
    return dataclasses.replace(loaded, how=f"{loaded.how}, experts in {dtype}{searched}")


def load_config(name: str | Path) -> Any:
    """Return the transformers config in the folder ``name``, or of that name on the hub.

    Families that CRISP has and transformers lacks are registered first.
    """
    transformers = import_extra("transformers")
    folder, name = Path(name), str(name)
    if not folder.is_dir() and (name.count("/") != 1 or folder.parent.is_dir() or name[0] in "/~"):
        raise CrispError(f"{name}: is no folder; one with a transformers checkpoint was expected")
    register()
    what = "its config" if folder.is_dir() else "no folder; asked the hub"
    with _quiet(transformers), one_line_errors(name, what):
        return transformers.AutoConfig.from_pretrained(name)


def model_without_weights(name: str | Path, config: Any, dtype: Any = None) -> Any:
    """Return the model that ``config`` describes, without weights: on torch's meta device.

    name: of the folder or on the hub, for errors. dtype: torch's, of the weights to be; None: that
    of the config. Raises CrispError for anything but a decoder-only language model.
    """
    auto, typed = (
        import_extra("transformers").AutoModelForCausalLM,
        {} if dtype is None else {"dtype": dtype},
    )
    what = f"model_type {config.model_type}"
    with one_line_errors(str(name), what), import_extra("torch").device("meta"):
        try:
            return auto.from_config(config, **typed)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            raise CrispError(f"{what} is no decoder-only language model of transformers") from error


def load_tokenizer(name: str | Path) -> Any:
    """Return the tokenizer beside a model; CrispError if there is none."""
    transformers = import_extra("transformers")
    with _quiet(transformers), one_line_errors(str(name), "its tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(name)


def _whole(name: str, auto: Any) -> Any:
    """Return the model with its weights; CrispError for missing and unexpected ones."""
    try:
        model, info = auto.from_pretrained(name, dtype="auto", output_loading_info=True)
    except RuntimeError as error:  # says "see the above report", and is of no other use
        raise CrispError(
            f"{name}: the weights do not fit the config: some are missing or of another shape"
        ) from error
    for keys, what in (
        ("missing_keys", "lacks {} of the model's weights"),
        ("unexpected_keys", "holds {} weights that the model does not have"),
    ):
        if info[keys]:
            raise CrispError(f"{name}: {what.format(len(info[keys]))}, such as {min(info[keys])}")
    return model


def _spec(name: str, transformers: Any) -> ModelSpec | None:
    """Return the model's geometry; None for a family that CRISP does not read."""
    folder = Path(name)
    file = folder / "config.json"
    if not folder.is_dir():
        file = Path(transformers.utils.cached_file(name, "config.json"))
    try:
        return ModelSpec.from_config(file, folder.resolve().name if folder.is_dir() else name)
    except CrispError:
        return None


@contextmanager
def one_line_errors(name: str, what: str) -> Iterator[None]:
    """Turn any error of transformers about the model ``name`` into a CrispError of one line."""
    try:
        yield
    except CrispError as error:
        raise CrispError(f"{name}: {error}" if name not in str(error) else str(error)) from error
    except MemoryError:
        raise
    except Exception as error:  # OSError, ValueError, KeyError, SafetensorError: no common base
        raise CrispError(f"{name}: cannot be used ({what}): {short_reason(error)}") from error


def short_reason(error: Exception) -> str:
    """Return an error's message as one line of at most 160 characters.

    >>> short_reason(ValueError("no such\\n   layer"))
    'no such layer'
    """
    reason = " ".join(str(error).split()) or type(error).__name__
    return reason if len(reason) <= 160 else reason[:157] + "..."


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence the progress bars and warnings of transformers and the hub.

    What they would warn of is checked here.
    """
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
