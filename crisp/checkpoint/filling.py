"""Set the weights of a model that was made without them, on torch's meta device."""

from __future__ import annotations

import copy
import re
from typing import Any

from crisp.checkpoint.conversion import FLOATS, Conversion
from crisp.checkpoint.files import Checkpoint
from crisp.checkpoint.library import model_without_weights
from crisp.checkpoint.meta_device import shapes_only
from crisp.checkpoint.quantised import DecodedCheckpoint
from crisp.errors import CrispError
from crisp.extras import import_extra


def decoded_model(checkpoint: DecodedCheckpoint, config: Any) -> Any:
    """Return the model of a quantised checkpoint in plain numbers.

    config: transformers', as it was read. On a CPU transformers reads some formats only, and
    computes in none; so this is one way for all of them. Activations are not quantised.
    """
    folder = checkpoint.folder
    model = model_without_weights(folder, plain_config(config), own_type(config, checkpoint))
    fill(model, checkpoint)
    if (folder / "generation_config.json").exists():
        generation = import_extra("transformers").GenerationConfig
        model.generation_config = generation.from_pretrained(folder)
    return model


def plain_config(config: Any) -> Any:
    """Return a copy of transformers' config that says nothing of quantisation."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def own_type(config: Any, checkpoint: Checkpoint) -> Any:
    """Return torch's type that the model is published in.

    Where the config does not say it, it is that of the first floating-point tensor, by which
    transformers goes as well; of a quantised checkpoint bfloat16.
    """
    torch = import_extra("torch")
    if config.dtype is not None:
        return config.dtype
    if isinstance(checkpoint, DecodedCheckpoint):
        return torch.bfloat16
    kinds = (tensor.dtype for tensor in checkpoint.tensors.values())
    return getattr(torch, next(FLOATS[kind] for kind in kinds if kind in FLOATS))


def fill(model: Any, checkpoint: Checkpoint) -> None:
    """Read all weights of ``model`` from a checkpoint, quantised or not, in the model's type.

    Memory holds the model and one layer's tensor of all experts beside it. Raises CrispError as
    `Conversion` does, and for weights that are left.
    """
    conversion = Conversion(model, checkpoint)
    keep_float32(model, model.dtype)
    compute_buffers(model)
    for name, tensor in conversion.tensors(model.state_dict().keys()):
        set_tensor(model, name, tensor)
    # The checkpoint has one of the names that a tied tensor goes by, or all of them.
    missing = {name for name, x in model.state_dict().items() if x.is_meta}
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    left = [name for name, x in model.state_dict().items() if x.is_meta]
    if left:  # a family may declare them optional; what it would do then is not understood
        raise CrispError(f"{checkpoint.folder}: lacks the model's {min(left)}")


def keep_float32(model: Any, kind: Any) -> None:
    """Convert the parameters to float32 that a family keeps in that type, such as routers.

    kind: torch's type of the model. transformers does so when it loads a model; here it happens on
    the meta device.
    """
    plan = model._get_dtype_plan(kind)
    if not plan:
        return
    kept = re.compile("|".join(name.replace("*", ".*") for name in plan))
    for name, tensor in model.state_dict().items():
        if kept.search(name):
            set_tensor(model, name, tensor.float())


def set_tensor(model: Any, name: str, tensor: Any) -> None:
    """Make ``tensor`` the parameter or buffer ``name`` of ``model``."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        module._parameters[leaf] = import_extra("torch.nn").Parameter(tensor, requires_grad=False)


def compute_buffers(model: Any) -> None:
    """Compute the buffers that no checkpoint holds, such as the frequencies of rotary positions.

    Call this before the first weight is set: what is in memory would be drawn anew.
    """
    torch = import_extra("torch")
    for name, buffer in list(model.named_non_persistent_buffers()):
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = torch.empty(buffer.shape, dtype=buffer.dtype)
    with shapes_only():
        model.initialize_weights()  # nothing happens to weights on the meta device
