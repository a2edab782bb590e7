"""A model of which only one decoder layer at a time is in memory.

The modules are transformers' own, without weights (on torch's meta device). A layer's weights are
read from the checkpoint, in float32, when the layer is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crisp.adapter import ExpertLayout, expert_layout
from crisp.checkpoint.conversion import Conversion
from crisp.checkpoint.files import Checkpoint
from crisp.checkpoint.filling import compute_buffers, set_tensor
from crisp.checkpoint.library import load_config, model_without_weights
from crisp.checkpoint.quantised import open_any
from crisp.errors import CrispError
from crisp.extras import import_extra


class Skeleton:
    """A model without its decoder layers; see `open_skeleton`.

    What is outside the decoder layers is in memory, except the head, which is not needed, and
    tables of embeddings, which stay on disk, mapped.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        self.model = model
        self.layout: ExpertLayout = expert_layout(model)
        self._stack = self.layout.stack + "."
        self._decoders = list(model.get_submodule(self._stack[:-1]))
        self._empty: dict[str, Any] = dict(model.state_dict())  # name -> meta tensor
        self._conversion = Conversion(model, checkpoint)
        compute_buffers(model)
        base = f"{model.base_model_prefix}." if model.base_model is not model else ""
        inside = (name for name in self._empty if name.startswith(base))
        self._load([n for n in inside if not n.startswith(self._stack) and not self._map(n)])

    @contextmanager
    def loaded_layer(self, index: int) -> Iterator[None]:
        """Keep the weights of decoder layer ``index`` in memory within the block."""
        prefix = f"{self._stack}{index}."
        names = [name for name in self._empty if name.startswith(prefix)]
        try:
            self._load(names)
            yield
        finally:
            for name in names:
                set_tensor(self.model, name, self._empty[name])

    def run_layer(self, index: int, ids: Any, below: Any) -> Any:
        """Return the output of decoder layer ``index``, which is loaded: [windows, length, d].

        ids: tokens [windows, length]. below: the output of the layer before it [windows, length,
        d], None for the first layer. Masks and positions are the model's own: it runs from its
        embedding on, but the layers before this one only return ``below``, and nothing runs after.
        """
        self._return_below(index, below)
        hook, output = self._decoders[index].register_forward_hook(_stop_here), None
        try:
            self.model.base_model(input_ids=ids, use_cache=False)
        except _LayerDone as done:
            output = done.output
        finally:
            hook.remove()
        if not isinstance(output, import_extra("torch").Tensor) or output.shape[:-1] != ids.shape:
            raise CrispError(
                f"{self._stack}{index} ({type(self._decoders[index]).__name__}): returns more than "
                "hidden states; it cannot be run on its own"
            )
        return output

    @contextmanager
    def loaded_head(self) -> Iterator[None]:
        """Keep what stands behind the decoder layers in memory within the block."""
        empty = self.model.state_dict()
        names = [n for n, x in empty.items() if x.is_meta and not n.startswith(self._stack)]
        try:
            self._load(names)
            head = self.model.get_output_embeddings()
            if head.weight.is_meta:  # tied to the table of embeddings, which has its own type
                table = self.model.get_input_embeddings().weight.float()
                head.weight = import_extra("torch.nn").Parameter(table, requires_grad=False)
            yield
        finally:
            for name in names:
                set_tensor(self.model, name, self._empty[name])

    def predict(self, ids: Any, below: Any) -> Any:
        """Return the model's logits [windows, length, vocabulary]; the head is loaded.

        ids: tokens [windows, length]. below: the output of the last decoder layer for them.
        """
        self._return_below(len(self._decoders), below)
        return self.model(input_ids=ids, use_cache=False).logits

    def _return_below(self, count: int, below: Any) -> None:
        """Make each of the first ``count`` decoder layers return ``below``."""
        for decoder in self._decoders[:count]:
            decoder.forward = lambda *_, **__: below

    def _load(self, names: list[str]) -> None:
        for name, tensor in self._conversion.tensors(set(names)):
            set_tensor(self.model, name, tensor)

    def _map(self, name: str) -> bool:
        """Map a table of embeddings from disk, in its own type; return whether that was done.

        What is looked up in it becomes float32.
        """
        module = self.model.get_submodule(name.rpartition(".")[0])
        if type(module) is not import_extra("torch.nn").Embedding:  # subclasses may compute with it
            return False
        table = self._conversion.mapped(name)
        if table is None:
            return False
        set_tensor(self.model, name, table)
        module.register_forward_hook(lambda _, __, output: output.float())
        return True


class _LayerDone(Exception):
    """Carries the output of a layer out of the model; not an error."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


def _stop_here(_: Any, __: Any, output: Any) -> None:
    raise _LayerDone(output)


def open_skeleton(folder: Path) -> Skeleton:
    """Open the model in ``folder`` without loading any of its decoder layers.

    Raises CrispError for a checkpoint that is not whole or does not fit its config, and for a model
    that is not understood (see `crisp.adapter.expert_layout`).
    """
    checkpoint, config = open_any(folder), load_config(folder)
    model = model_without_weights(folder, config, import_extra("torch").float32)
    return Skeleton(model.eval(), checkpoint)
