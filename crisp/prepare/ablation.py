"""Running a model with some of its experts masked in one layer, and what that does to its loss.

Below the layer nothing changes, so a masked run starts there: the decoder layers in front return
what they returned in the plain run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter import Experts, execute, handling, layout, ranked
from crisp.checkpoint.windows import Windows
from crisp.errors import CrispError
from crisp.extras import need
from crisp.prepare.calibration import Floats, Ints, batches, tensor

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Batch:
    """Some windows side by side in the plain run, as one layer sees it; n tokens, k experts each.

    ``loss`` is that of the next token; ``scored`` says for which tokens it counts (no window's last
    one, and none that only gives context).
    """

    windows: Ints  # numbers of the windows
    ids: Any  # [windows, length]
    below: Any  # what the decoder layer in front returned; None for the first layer
    experts: Ints  # [n, k] by descending weight, -1 absent
    rank: Ints  # [n, k]: the router's column of each
    loss: Floats  # [n]
    scored: Flags  # [n]


class Ablation:
    """A model and the text that its loss is measured on."""

    def __init__(self, model: Any, windows: Windows) -> None:
        self._model = model
        self._windows = windows
        self._layout = layout(model)
        self._experts = [Experts.of(layer) for layer in self._layout.layers]
        parts = self._layout.layers[0].name.split(".")
        depth = next(i for i, part in enumerate(parts) if part.isdecimal())
        self._decoders = list(model.get_submodule(".".join(parts[:depth])))

    @property
    def layers(self) -> list[int]:
        """The MoE layers, by their place among the decoder layers."""
        return [layer.index for layer in self._layout.layers]

    @property
    def n_experts(self) -> int:
        """Routed experts of a layer."""
        return self._layout.n_experts

    def plain(self, layer: int) -> list[Batch]:
        """A full run over the text, with what masked runs of ``layer`` need: one pass.

        Raises CrispError for a loss that is not finite.
        """
        which, first, found = self.layers.index(layer), 0, []
        for tokens in batches(self._windows.tokens):
            numbers = np.arange(first, first + len(tokens))
            first += len(tokens)
            ids = tensor(tokens, self._model)
            routed: list[tuple[Any, Any]] = []
            below: list[Any] = []
            with _keeping(self._decoders[:layer], below):
                loss = self._loss(ids, which, routed=routed)
            scored = _scored(ids.shape[1], [self._windows.fresh[number] for number in numbers])
            if not np.isfinite(loss[scored]).all():
                raise CrispError(f"{type(self._model).__name__}: its loss is not finite")
            own = self._experts[which]
            experts, _, rank = ranked(*routed[0], own.n_experts, own.name)
            found.append(
                Batch(
                    windows=numbers,
                    ids=ids,
                    below=below[0] if below else None,
                    experts=experts.astype(np.int64),
                    rank=rank,
                    loss=loss,
                    scored=scored,
                )
            )
        return found

    def masked(self, layer: int, batch: Batch, mask: Flags) -> Floats:
        """What each token's loss gains when (token, expert)s of ``layer`` are masked: [n].

        mask [n, k], columns as in ``batch.experts``. A masked expert adds nothing, and its weight
        goes to nobody. 0 for tokens that are not scored.
        """
        neurons = self._neurons(layer, batch, mask, 0)
        with _standing_for(self._decoders[:layer], batch.below):
            loss = self._loss(batch.ids, self.layers.index(layer), neurons)
        return np.where(batch.scored, loss - batch.loss, 0)

    def moved(self, layer: int, batch: Batch, mask: Flags, lefts: Sequence[int]) -> Floats:
        """How far predictions move when (token, expert)s of ``layer`` execute fewer neurons.

        For each of ``lefts``, the leading neurons that masked ones execute, and each token the
        Kullback-Leibler divergence from the prediction of the plain run, in nats: [lefts, n]. Where
        texts are as the model predicts, it is the mean of what the loss gains. mask [n, k], as in
        `masked`; 0 for tokens that are not scored.
        """
        torch, found = need("torch"), []
        which = self.layers.index(layer)
        with torch.inference_mode(), _standing_for(self._decoders[:layer], batch.below):
            plain = _log_chances(self._logits(batch.ids, which))
            for left in lefts:
                neurons = self._neurons(layer, batch, mask, left)
                logits = self._logits(batch.ids, which, neurons)
                each = [
                    (before.exp() * (before - _log_chances(after))).sum(-1)
                    for before, after in zip(plain, logits, strict=True)
                ]
                found.append(np.where(batch.scored, torch.cat(each).double().cpu().numpy(), 0))
        return np.stack(found)

    def _neurons(self, layer: int, batch: Batch, mask: Flags, left: int) -> Ints:
        """What is executed, by the router's columns: ``left`` neurons where masked [n, k]."""
        full = self._experts[self.layers.index(layer)].d_ff
        neurons = np.full(mask.shape, full, np.int64)
        np.put_along_axis(neurons, batch.rank, np.where(mask, left, full), 1)
        return neurons

    def _loss(
        self,
        ids: Any,
        which: int,
        neurons: Ints | None = None,
        routed: list[tuple[Any, Any]] | None = None,
    ) -> Floats:
        """Negative log-likelihood of the token after each, in nats: [n], 0 at windows' ends.

        As `_logits`.
        """
        torch = need("torch")
        loss = np.zeros(tuple(ids.shape))
        with torch.inference_mode():
            logits = self._logits(ids, which, neurons, routed)
            wide = torch.promote_types(logits.dtype, torch.float32)
            for row, (own, target) in enumerate(zip(logits, ids, strict=True)):
                entropy = torch.nn.functional.cross_entropy  # own [length, vocabulary]
                each = entropy(own[:-1].to(wide), target[1:], reduction="none")
                loss[row, :-1] = each.double().cpu().numpy()
        return loss.reshape(-1)

    def _logits(
        self,
        ids: Any,
        which: int,
        neurons: Ints | None = None,
        routed: list[tuple[Any, Any]] | None = None,
    ) -> Any:
        """The model's, [windows, length, vocabulary].

        MoE layer number ``which`` executes ``neurons`` [n, k] (None: all), and what its router
        says is added to ``routed``.
        """
        torch = need("torch")
        asked = None if neurons is None else torch.from_numpy(neurons).to(ids.device)

        def handler(at: int, hidden: Any, index: Any, weights: Any, _: Any) -> Any:
            if at == which and routed is not None:
                routed.append((index, weights))
            own = asked if at == which else None
            return execute(self._experts[at], hidden, index, weights, own)

        with handling(self._layout, handler):
            return self._model(input_ids=ids, use_cache=False).logits


def _log_chances(logits: Any) -> Any:
    """Log-softmax, in float32 at least."""
    wide = need("torch").promote_types(logits.dtype, need("torch").float32)
    return logits.to(wide).log_softmax(-1)


def _scored(length: int, fresh: Sequence[int]) -> Flags:
    """Tokens whose successor is among the last ``fresh`` of its window: [windows * length]."""
    place = np.arange(length)
    rows = [(place + 1 >= length - count) & (place + 1 < length) for count in fresh]
    return np.concatenate(rows)


@contextmanager
def _keeping(decoders: Sequence[Any], kept: list[Any]) -> Iterator[None]:
    """Add to ``kept`` what the last of ``decoders`` returns, if there is one."""
    with ExitStack() as undo:
        for decoder in decoders[-1:]:
            hook = decoder.register_forward_hook(lambda _, __, output: kept.append(output))
            undo.callback(hook.remove)
        yield


@contextmanager
def _standing_for(decoders: Sequence[Any], output: Any) -> Iterator[None]:
    """Let every one of ``decoders`` return ``output`` instead of computing anything."""
    with ExitStack() as undo:
        for decoder in decoders:
            own = decoder.__dict__.get("forward")
            decoder.forward = lambda *_, **__: output
            undo.callback(_restore, decoder, own)
        yield


def _restore(module: Any, forward: Any) -> None:
    del module.forward
    if forward is not None:
        module.forward = forward
