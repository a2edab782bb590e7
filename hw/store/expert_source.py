"""Where the experts of a store come from: a plain checkpoint, a quantised one, or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from crisp.adapter import ExpertLayout
from crisp.checkpoint.expert_tensors import ExpertTensor, expert_tensors
from crisp.checkpoint.files import Checkpoint, TensorEntry, weights_digest
from crisp.checkpoint.gguf import GgufExperts
from crisp.checkpoint.quantised import DecodedCheckpoint
from crisp.checkpoint.quantised.view import Decoder
from crisp.hw.store.checkpoint_experts import Expert, ExpertReader
from crisp.hw.store.dtypes import Array, convert_bits, copy_rows
from crisp.progress import Progress, counter


class ExpertSource(Protocol):
    """Experts to be packed, read layer by layer and in order."""

    kind: str
    """safetensors' name of the type that experts are read in."""

    def expert(self, layer: int, expert: int) -> Expert:
        """Read one expert. Raises CrispError for NaN and infinite weights."""

    def weights(self) -> str:
        """Return the digest of everything that is stored, once all experts have been read."""


@contextmanager
def expert_source(
    checkpoint: Checkpoint, layout: ExpertLayout, progress: Progress
) -> Iterator[ExpertSource]:
    """Open the experts of a checkpoint, quantised or not; layout: of `locate_experts`.

    progress: called with the bytes read and those to read; a quantised one is hashed apart.
    """
    if not isinstance(checkpoint, DecodedCheckpoint):
        total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        with ExpertReader(checkpoint, layout, counter(progress, total)) as reader:
            yield reader
        return
    stored = checkpoint.stored.tensors
    names = [
        part
        for name in expert_tensors(checkpoint, layout)
        for part in (
            checkpoint.weights[name].parts.values() if name in checkpoint.weights else [name]
        )
    ]
    total = sum(stored[name].nbytes for name in (*names, *stored))
    with (
        checkpoint.decoder() as decoder,
        _DecodedReader(checkpoint, decoder, layout, counter(progress, total)) as reader,
    ):
        yield reader


class _DecodedReader(ExpertReader):
    """Reads the experts of a quantised checkpoint in float32."""

    def __init__(
        self,
        checkpoint: DecodedCheckpoint,
        decoder: Decoder,
        layout: ExpertLayout,
        advance: Callable[[int], None],
    ) -> None:
        super().__init__(checkpoint, layout, advance)
        self._decoded, self._decoder = checkpoint, decoder

    def weights(self) -> str:
        """Hash all stored tensors; return `crisp.checkpoint.files.weights_digest`."""
        before = 0

        def progress(done: int, _: int) -> None:
            nonlocal before
            self._advance(done - before)
            before = done

        return weights_digest(self._checkpoint.folder, progress)

    def _only_kind(self) -> str:
        return "F32"

    def _read(self, tensor: TensorEntry, place: ExpertTensor, expert: int) -> tuple[Array, str]:
        weight = self._decoded.weights.get(tensor.name)
        if weight is None:  # experts, or their biases, that were left as they are
            data, kind = super()._read(tensor, place, expert)
            return convert_bits(data, kind, "F32"), "F32"
        numbers = self._decoder.read_matrix(tensor.name, expert - place.first)
        for part in weight.parts.values():
            self._advance(self._decoded.stored.tensors[part].nbytes // place.count)
        if not numbers.flags.c_contiguous:
            turned, numbers = numbers, np.empty(numbers.shape, np.float32)
            copy_rows(turned, numbers)
        return numbers.view(np.uint32).reshape(-1), "F32"


class GgufSource:
    """Reads the experts of a GGUF file in float32."""

    kind = GgufExperts.kind

    def __init__(self, experts: GgufExperts) -> None:
        """experts: opened."""
        self._experts = experts

    def expert(self, layer: int, expert: int) -> Expert:
        """Read one expert. Raises CrispError for NaN and infinite weights."""
        matrices = self._experts.matrices(layer, expert)
        biases = self._experts.biases(layer, expert)
        return Expert(*(tuple(x.view(np.uint32) for x in part) for part in (matrices, biases)))

    def weights(self) -> str:
        """Return the digest of all tensors of the file."""
        return self._experts.weights()
