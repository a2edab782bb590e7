"""Loading of a transformers checkpoint with its tokenizer; errors are one line each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter import Experts, expert_layout
from crisp.checkpoint.admission import admit, is_extra, refuse_unless_extra
from crisp.checkpoint.filling import decoded_model
from crisp.checkpoint.library import auto_class, quiet
from crisp.checkpoint.library import load_config as load_config
from crisp.checkpoint.library import load_tokenizer as load_tokenizer
from crisp.checkpoint.library import model_without_weights as model_without_weights
from crisp.checkpoint.library import one_line_errors as one_line_errors
from crisp.checkpoint.library import short_reason as short_reason
from crisp.checkpoint.quantised import DecodedCheckpoint
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
    spec: ModelSpec | None  # None for a model whose geometry CRISP does not read
    how: str  # type, device and versions
    notes: tuple[str, ...] = ()  # what was not taken as it stood


def load_model(name: str | Path) -> LoadedModel:
    """Load the MoE language model in the folder ``name``, or of that name on the hub.

    It keeps the type it was published in, and is put on the GPU if there is one. Raises CrispError
    for what `crisp.checkpoint.admission.admit` refuses, and for weights that are missing or that
    the config does not know; but for the latter, before any weight is read. Weights of layers
    beyond the model's (they predict further tokens) are left alone, which a note says.
    """
    torch, transformers = import_extra("torch"), import_extra("transformers")
    admitted = admit(name, tokenizer=True)
    checkpoint, method = admitted.checkpoint, ""
    with quiet(transformers), one_line_errors(str(name), "its weights"):
        if isinstance(checkpoint, DecodedCheckpoint):
            model, method = decoded_model(checkpoint, admitted.config), checkpoint.method
            left = [x for x in checkpoint.tensors if is_extra(x, admitted.n_layers)]
        else:
            model, left = _with_weights(str(name), admitted.source.folder, admitted.config)
    notes = refuse_unless_extra(left, admitted.n_layers, str(name))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return LoadedModel(
        model=model.to(device).eval(),
        tokenizer=admitted.tokenizer,
        name=admitted.source.name,
        revision=admitted.source.revision,
        spec=None if admitted.geometry is None else admitted.geometry.spec,
        how=f"{str(model.dtype).removeprefix('torch.')} on {device}, "
        f"{f'decoded from {method}, ' if method else ''}"
        f"torch {torch.__version__}, transformers {transformers.__version__}",
        notes=(*admitted.notes, *notes),
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
    scales are fitted. The model computes in its own type as before. Raises CrispError for weights
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
    fitted = ", scales fitted" if moments is not None and dtype == "int4" else ""
    return dataclasses.replace(loaded, how=f"{loaded.how}, experts in {dtype}{fitted}")


def _with_weights(name: str, folder: Path, config: Any) -> tuple[Any, list[str]]:
    """Return the model, and the weights that it does not have; CrispError for missing ones."""
    try:
        model, info = auto_class(config).from_pretrained(
            folder, dtype="auto", output_loading_info=True, trust_remote_code=False
        )
    except RuntimeError as error:  # says "see the above report", and is of no other use
        raise CrispError(
            f"{name}: the weights do not fit the config: some are missing or of another shape"
        ) from error
    missing = info["missing_keys"]
    if missing:
        raise CrispError(
            f"{name}: lacks {len(missing)} of the model's weights, such as {min(missing)}"
        )
    return model, list(info["unexpected_keys"])
