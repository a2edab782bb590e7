"""How the loss of a model changes when some of its experts are masked in one layer.

Below that layer nothing changes, so a masked run starts there: the decoder layers before it return
what they returned in the plain run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter import Experts, execute, expert_layout, intercept_experts, rank_by_weight
from crisp.adapter.calls import replaced_forward
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.prepare.calibration import Floats, Ints, batch_windows, to_token_ids
from crisp.text_windows import TokenWindows

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class AblationBatch:
    """Some windows side by side in the plain run, as one layer sees them.

    n = windows * length tokens with k experts each.
    """

    windows: Ints  # [windows]: their numbers
    ids: Any  # [windows, length]: tokens
    below: Any  # output of the decoder layer before, [windows, length, d]; None for the first layer
    experts: Ints  # [n, k] by descending weight, -1 absent
    rank: Ints  # [n, k]: the router's column of each
    loss: Floats  # [n]: of the next token, in nats
    # [n]: tokens whose loss counts: no window's last one, and none that only gives context
    scored: Flags


class Ablation:
    """Masked runs of a model over the text that its loss is measured on."""

    def __init__(self, model: Any, windows: TokenWindows) -> None:
        self._model = model
        self._windows = windows
        self._layout = expert_layout(model)
        self._experts = [Experts.of(layer) for layer in self._layout.layers]
        self._decoders = list(model.get_submodule(self._layout.stack))

    @property
    def layers(self) -> list[int]:
        """Places of the MoE layers among the decoder layers."""
        return [layer.index for layer in self._layout.layers]

    @property
    def n_experts(self) -> int:
        """Number of routed experts of a layer."""
        return self._layout.n_experts

    def plain(self, layer: int) -> list[AblationBatch]:
        """Run the model in full over the text, once; return what masked runs of ``layer`` need.

        Raises CrispError for a loss that is not finite.
        """
        which, first, result = self.layers.index(layer), 0, []
        for tokens in batch_windows(self._windows.tokens):
            numbers = np.arange(first, first + len(tokens))
            first += len(tokens)
            ids = to_token_ids(tokens, self._model)
            routed: list[tuple[Any, Any]] = []
            below: list[Any] = []
            with _collected_output(self._decoders[:layer], below):
                loss = self._loss(ids, which, routed=routed)
            counts = [self._windows.scored[number] for number in numbers]
            scored = scored_tokens(ids.shape[1], counts)
            if not np.isfinite(loss[scored]).all():
                raise CrispError(f"{type(self._model).__name__}: its loss is not finite")
            layer_experts = self._experts[which]
            experts, _, rank = rank_by_weight(
                *routed[0], layer_experts.n_experts, layer_experts.name
            )
            result.append(
                AblationBatch(
                    windows=numbers,
                    ids=ids,
                    below=below[0] if below else None,
                    experts=experts.astype(np.int64),
                    rank=rank,
                    loss=loss,
                    scored=scored,
                )
            )
        return result

    def masked(self, layer: int, batch: AblationBatch, mask: Flags) -> Floats:
        """Return by how much each token's loss grows with masked experts, in nats: [n].

        mask [n, k]: (token, expert)s of ``layer``, columns as in ``batch.experts``. A masked expert
        adds nothing to its token, and its weight is given to no other. 0 for tokens that are not
        scored.
        """
        neurons = self._neurons(layer, batch, mask, 0)
        with fixed_output(self._decoders[:layer], batch.below):
            loss = self._loss(batch.ids, self.layers.index(layer), neurons)
        return np.where(batch.scored, loss - batch.loss, 0)

    def divergence(
        self, layer: int, batch: AblationBatch, mask: Flags, widths: Sequence[int]
    ) -> Floats:
        """Return how far predictions move when masked experts execute fewer neurons.

        For each of ``widths``, leading neurons that masked experts execute, and each token: the
        Kullback-Leibler divergence from the prediction of the plain run, in nats: [widths, n].
        Where texts are as the model predicts, it is by how much the loss grows on average. mask
        [n, k], as in `masked`; 0 for tokens that are not scored.
        """
        torch, result = import_extra("torch"), []
        which = self.layers.index(layer)
        with torch.inference_mode(), fixed_output(self._decoders[:layer], batch.below):
            plain = log_probabilities(self._logits(batch.ids, which))
            for width in widths:
                neurons = self._neurons(layer, batch, mask, width)
                logits = self._logits(batch.ids, which, neurons)
                by_window = [  # [length] each
                    (before.exp() * (before - log_probabilities(after))).sum(-1)
                    for before, after in zip(plain, logits, strict=True)
                ]
                moved = torch.cat(by_window).double().cpu().numpy()  # [n]
                result.append(np.where(batch.scored, moved, 0))
        return np.stack(result)

    def _neurons(self, layer: int, batch: AblationBatch, mask: Flags, width: int) -> Ints:
        """Return neurons to execute by the router's columns [n, k]: ``width`` where masked."""
        full = self._experts[self.layers.index(layer)].d_ff
        neurons = np.full(mask.shape, full, np.int64)
        np.put_along_axis(neurons, batch.rank, np.where(mask, width, full), 1)
        return neurons

    def _loss(
        self,
        ids: Any,
        which: int,
        neurons: Ints | None = None,
        routed: list[tuple[Any, Any]] | None = None,
    ) -> Floats:
        """Return the negative log-likelihood of each next token, in nats: [n], 0 at windows' ends.

        The arguments are those of `_logits`.
        """
        torch = import_extra("torch")
        loss = np.zeros(tuple(ids.shape))
        with torch.inference_mode():
            logits = self._logits(ids, which, neurons, routed)
            wide = torch.promote_types(logits.dtype, torch.float32)
            for row, (predicted, target) in enumerate(zip(logits, ids, strict=True)):
                entropy = torch.nn.functional.cross_entropy  # predicted [length, vocabulary]
                losses = entropy(predicted[:-1].to(wide), target[1:], reduction="none")
                loss[row, :-1] = losses.double().cpu().numpy()
        return loss.reshape(-1)

    def _logits(
        self,
        ids: Any,
        which: int,
        neurons: Ints | None = None,
        routed: list[tuple[Any, Any]] | None = None,
    ) -> Any:
        """Return the model's logits for ids [windows, length]: [windows, length, vocabulary].

        MoE layer number ``which`` executes ``neurons`` [n, k] (None: all), and what its router
        returns, (index [n, k], weights [n, k]), is added to ``routed``.
        """
        torch = import_extra("torch")
        on_device = None if neurons is None else torch.from_numpy(neurons).to(ids.device)

        def handler(at: int, hidden: Any, index: Any, weights: Any, _: Any) -> Any:
            if at == which and routed is not None:
                routed.append((index, weights))
            executed = on_device if at == which else None
            return execute(self._experts[at], hidden, index, weights, executed)

        with intercept_experts(self._layout, handler):
            return self._model(input_ids=ids, use_cache=False).logits


def log_probabilities(logits: Any) -> Any:
    """Return the log-softmax [..., vocabulary], in float32 at least."""
    wide = import_extra("torch").promote_types(logits.dtype, import_extra("torch").float32)
    return logits.to(wide).log_softmax(-1)


def scored_tokens(length: int, scored: Sequence[int]) -> Flags:
    """Return which tokens predict one of their window's last ``scored``: [windows * length]."""
    place = np.arange(length)
    rows = [(place + 1 >= length - count) & (place + 1 < length) for count in scored]
    return np.concatenate(rows)


@contextmanager
def _collected_output(decoders: Sequence[Any], outputs: list[Any]) -> Iterator[None]:
    """Add to ``outputs`` what the last of ``decoders`` returns, if there is one."""
    with ExitStack() as stack:
        for decoder in decoders[-1:]:
            hook = decoder.register_forward_hook(lambda _, __, output: outputs.append(output))
            stack.callback(hook.remove)
        yield


@contextmanager
def fixed_output(decoders: Sequence[Any], output: Any) -> Iterator[None]:
    """Make every one of ``decoders`` return ``output`` instead of computing anything."""
    with ExitStack() as stack:
        for decoder in decoders:
            stack.enter_context(replaced_forward(decoder, lambda *_, **__: output))
        yield
