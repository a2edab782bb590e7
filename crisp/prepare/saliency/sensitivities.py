"""How much a layer's missing contributions raise the loss: one number a layer.

In one layer alone every token leaves out the lower half of what its experts' blocks contribute, by
router weight x mean contribution. The layer's sensitivity is

    sqrt(increase of the loss / mean over tokens of (sum of weight x contribution left out)^2),

so that weight x contribution x sensitivity means the same in every layer: the square of their sum
over a token is by how much its loss grows, roughly.

The loss is the one that the model itself expects, as in `crisp.prepare.width_losses`: the
Kullback-Leibler divergence from the prediction at full width. On a few thousand tokens the loss of
the text's own next tokens would mostly tell how these happen to fall, and for robust layers even
with the wrong sign. Outputs are rescaled (`crisp.prepare.saliency.rescaling`), as they are when the
policy that uses the sensitivities leaves blocks out: the loss that counts is the one left then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crisp.adapter import Experts, execute, expert_layout, intercept_experts
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.files import atomic
from crisp.prepare.ablation import fixed_output, log_probabilities, scored_tokens
from crisp.prepare.calibration import Floats, batch_windows, to_token_ids
from crisp.prepare.saliency.rescaling import Factors
from crisp.progress import Progress, no_progress
from crisp.text_windows import TokenWindows

TOKENS = 4096  # of the sample that sensitivities are measured on, at most


@dataclass(frozen=True, eq=False)
class HalvedLayer:
    """One layer's experts without the lower half of what a token's blocks contribute."""

    experts: Experts
    contributions: Floats  # [E, blocks]
    factors: Factors  # [E, blocks + 1]
    block: int  # neurons

    def run(self, hidden: Any, index: Any, weights: Any) -> tuple[Any, Floats]:
        """Return the output [n, d_model], and of each token weight x contribution left out: [n].

        hidden [n, d_model]; index and weights [n, k]: as the router returned them.
        """
        torch = import_extra("torch")
        ids = index.cpu().numpy()
        absent = ids == self.experts.n_experts
        ids = np.where(absent, 0, ids)
        sizes = np.where(absent, 0, weights.double().cpu().numpy())
        widths, left_out = upper_half(sizes, self.contributions[ids], absent)
        neurons = torch.from_numpy(np.minimum(widths * self.block, self.experts.d_ff))
        if not self.experts.scales_inputs:  # where weights scale inputs they cannot scale outputs
            scale = np.take_along_axis(self.factors[ids], widths[:, :, None], 2)[:, :, 0]
            weights = weights * torch.from_numpy(scale).to(weights.device, weights.dtype)
        output = execute(self.experts, hidden, index, weights, neurons.to(index.device))
        return output, left_out


def upper_half(weights: Floats, contributions: Floats, absent: NDArray[np.bool_]) -> Any:
    """Return widths in blocks [n, k] at which each token keeps the upper half, and the rest [n].

    weights [n, k]; contributions [n, k, blocks]: of the experts' blocks; absent [n, k]: no expert.
    Blocks are ranked by weight x the least contribution of a block and those before it, so that the
    blocks kept of an expert are its leading ones; equal ones by the router's column, then by place.
    Of an odd number the middle one is left out too. The rest is the sum of weight x contribution
    over what is left out.
    """
    n, k, blocks = contributions.shape
    leading = weights[:, :, None] * np.minimum.accumulate(contributions, axis=2)
    leading[absent] = -np.inf
    order = np.argsort(-leading.reshape(n, -1), axis=1, kind="stable")
    rank = np.argsort(order, axis=1).reshape(n, k, blocks)
    half = (k - absent.sum(axis=1)) * blocks // 2
    kept = rank < half[:, None, None]
    left_out = np.where(kept, 0, weights[:, :, None] * contributions)
    return kept.sum(axis=2), left_out.sum(axis=(1, 2))


@dataclass(eq=False)
class SensitivitySums:
    """What has been added up about every MoE layer, in their order."""

    moved: Floats  # [MoE layers]: divergence, in nats, over scored tokens
    squares: Floats  # [MoE layers]: (weight x contribution left out)^2, over all tokens
    scored: int = 0
    tokens: int = 0
    windows: int = 0

    @classmethod
    def empty(cls, layers: int) -> SensitivitySums:
        """Return the sums before the first token."""
        return cls(np.zeros(layers), np.zeros(layers))

    def save(self, path: Path) -> None:
        """Write everything to one ``.npz`` file, whole or not at all."""
        read = np.array([self.scored, self.tokens, self.windows])
        with atomic(path) as temporary, temporary.open("wb") as file:
            np.savez(file, moved=self.moved, squares=self.squares, read=read)

    @classmethod
    def load(cls, path: Path) -> SensitivitySums:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            return cls(file["moved"], file["squares"], *file["read"].tolist())

    def sensitivities(self) -> Floats:
        """Return the sensitivity of each MoE layer; 0 for one that contributes nothing."""
        increase = self.moved.clip(0) / max(1, self.scored)  # below 0 by rounding alone
        square = self.squares / max(1, self.tokens)
        ratio = np.divide(increase, square, out=np.zeros_like(square), where=square > 0)
        return np.sqrt(ratio)


def measure_sensitivities(
    model: Any,
    windows: TokenWindows,
    block: int,
    contributions: Mapping[int, NDArray[np.float32]],
    factors: Mapping[int, Factors],
    folder: Path | None = None,
    progress: Progress = no_progress,
) -> dict[int, float]:
    """Return the sensitivity of every MoE layer, measured on ``windows``.

    Neurons are taken in their order in the model, ``block`` of them a block. contributions and
    factors: by layer [E, blocks] and [E, blocks + 1]. Each batch of windows runs once in full and
    once for each layer, from that layer up. The sums are saved to ``folder`` (None: nowhere) after
    each batch, and taken from there when the same call is made again; the result is the same to the
    bit. progress: called with (layers times tokens done, in all). Raises CrispError for a loss that
    is not finite.
    """
    layout = expert_layout(model)
    layers = [layer.index for layer in layout.layers]
    experts = [Experts.of(layer) for layer in layout.layers]
    decoders = list(model.get_submodule(layout.stack))
    halves = [
        HalvedLayer(of_layer, contributions[layer].astype(np.float64), factors[layer], block)
        for layer, of_layer in zip(layers, experts, strict=True)
    ]
    file = None if folder is None else folder / "sensitivities.npz"
    sums = SensitivitySums.empty(len(layers))
    if file is not None and file.exists():
        sums = SensitivitySums.load(file)
    halved: int | None = None  # number of the MoE layer

    def handler(at: int, hidden: Any, index: Any, weights: Any, _: Any) -> Any:
        if at != halved:
            return execute(experts[at], hidden, index, weights)
        output, left_out = halves[at].run(hidden, index, weights)
        sums.squares[at] += np.square(left_out).sum()
        return output

    with import_extra("torch").inference_mode(), intercept_experts(layout, handler):
        for batch in batch_windows(windows.tokens, sums.windows):
            ids = to_token_ids(batch, model)
            scored = windows.scored[sums.windows : sums.windows + len(batch)]
            with _collected_outputs(decoders) as outputs:
                plain = log_probabilities(model(input_ids=ids, use_cache=False).logits)
            for halved, layer in enumerate(layers):
                with fixed_output(decoders[:layer], outputs[layer - 1] if layer else None):
                    logits = model(input_ids=ids, use_cache=False).logits
                sums.moved[halved] += divergence(plain, logits, scored)
                done = sums.tokens * len(layers) + ids.numel() * (halved + 1)
                progress(done, windows.n_fed * len(layers))
            halved = None
            sums.scored += sum(scored)
            sums.tokens += ids.numel()
            sums.windows += len(batch)
            if not np.isfinite(sums.moved).all():
                raise CrispError(f"{type(model).__name__}: its loss is not finite")
            if file is not None:
                sums.save(file)
    return dict(zip(layers, sums.sensitivities().tolist(), strict=True))


def divergence(plain: Any, logits: Any, scored: Sequence[int]) -> float:
    """Return the Kullback-Leibler divergence, in nats, summed over scored tokens.

    plain: log-probabilities of the plain run, and logits of another, [windows, length, vocabulary];
    scored: of each window, how many of its last tokens count.
    """
    total = 0.0
    for before, after, count in zip(plain, logits, scored, strict=True):
        each = (before.exp() * (before - log_probabilities(after))).sum(-1)  # [length]
        total += float(each.double().cpu().numpy()[scored_tokens(len(each), [count])].sum())
    return total


@contextmanager
def _collected_outputs(decoders: Sequence[Any]) -> Iterator[list[Any]]:
    """Return a list to which every one of ``decoders`` adds what it returns within the block."""
    outputs: list[Any] = []
    with ExitStack() as stack:
        for decoder in decoders:
            hook = decoder.register_forward_hook(lambda _, __, output: outputs.append(output))
            stack.callback(hook.remove)
        yield outputs
