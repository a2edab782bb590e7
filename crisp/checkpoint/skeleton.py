"""A model of which one decoder layer at a time is in memory.

The modules are transformers' own, without weights (on torch's meta device). A layer's weights come
from the checkpoint when it is its turn, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crisp.adapter import Layout, layout
from crisp.checkpoint.conversion import Conversion
from crisp.checkpoint.files import Checkpoint, open_checkpoint
from crisp.checkpoint.loading import load_config, one_line
from crisp.errors import CrispError
from crisp.extras import need


class Skeleton:
    """See `open_skeleton`. What is outside the decoder layers is in memory, but for the head, and
    but for tables of embeddings: those stay on disk, mapped.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        self.model = model
        self.found: Layout = layout(model)
        parts = self.found.layers[0].name.split(".")
        depth = next(i for i, part in enumerate(parts) if part.isdecimal())
        self._stack = ".".join(parts[:depth]) + "."
        self._decoders = list(model.get_submodule(self._stack[:-1]))
        self._empty: dict[str, Any] = dict(model.state_dict())  # name -> meta tensor
        self._conversion = Conversion(model, checkpoint)
        make_buffers(model)
        base = f"{model.base_model_prefix}." if model.base_model is not model else ""
        inside = (name for name in self._empty if name.startswith(base))
        self._load([n for n in inside if not n.startswith(self._stack) and not self._map(n)])

    @contextmanager
    def holding(self, index: int) -> Iterator[None]:
        """Decoder layer ``index`` has its weights in memory within the block."""
        prefix = f"{self._stack}{index}."
        names = [name for name in self._empty if name.startswith(prefix)]
        try:
            self._load(names)
            yield
        finally:
            for name in names:
                place(self.model, name, self._empty[name])

    def run(self, index: int, ids: Any, below: Any) -> Any:
        """What decoder layer ``index``, held, makes of windows: [windows, length, d].

        ids [windows, length]; below: what the layer in front made of them, None for the first
        layer. Masks and positions are the model's own: it runs from its embedding on, but the
        layers in front only hand on ``below``, and nothing runs after this one.
        """
        for decoder in self._decoders[:index]:
            decoder.forward = lambda *_, **__: below
        hook, output = self._decoders[index].register_forward_hook(_stop), None
        try:
            self.model.base_model(input_ids=ids, use_cache=False)
        except _Done as done:
            output = done.output
        finally:
            hook.remove()
        if not isinstance(output, need("torch").Tensor) or output.shape[:-1] != ids.shape:
            raise CrispError(
                f"{self._stack}{index} ({type(self._decoders[index]).__name__}): returns more than "
                "hidden states; it cannot be run on its own"
            )
        return output

    def _load(self, names: list[str]) -> None:
        for name, tensor in self._conversion.tensors(set(names)):
            place(self.model, name, tensor)

    def _map(self, name: str) -> bool:
        """Leave a table of embeddings on disk, in its own type; what is looked up is float32."""
        module = self.model.get_submodule(name.rpartition(".")[0])
        if type(module) is not need("torch.nn").Embedding:  # subclasses may compute with it
            return False
        table = self._conversion.mapped(name)
        if table is None:
            return False
        place(self.model, name, table)
        module.register_forward_hook(lambda *seen: seen[-1].float())
        return True


class _Done(Exception):
    """A layer has been run; not an error."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


def _stop(_: Any, __: Any, output: Any) -> None:
    raise _Done(output)


def place(model: Any, name: str, tensor: Any) -> None:
    """Make ``tensor`` the parameter or buffer of that name."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        module._parameters[leaf] = need("torch.nn").Parameter(tensor, requires_grad=False)


def make_buffers(model: Any) -> None:
    """Compute what no checkpoint holds, such as the frequencies of rotary positions.

    To be called before the first weight is placed: what is in memory would be drawn anew.
    """
    torch = need("torch")
    for name, buffer in list(model.named_non_persistent_buffers()):
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()  # nothing happens to weights on the meta device


def open_skeleton(folder: Path) -> Skeleton:
    """The model in ``folder``, none of its decoder layers in memory.

    Raises CrispError for a checkpoint that is not whole or does not fit its config, and for a model
    that is not understood (see `crisp.adapter.layout`).
    """
    torch, transformers = need("torch"), need("transformers")
    checkpoint, config = open_checkpoint(folder), load_config(folder)
    with one_line(str(folder), "its config"), torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Skeleton(model.eval(), checkpoint)
