"""A model with what its calibration text says about it: sums, roles, orders, and their profiles."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.quality.estimates import Reading
from benchmarks.quality.setting import BLOCK, KINDS, WINDOW, Orders, Routes, Setting
from crisp.files import atomic
from crisp.prepare.calibration import CalibrationSums, LayerSums, calibrate
from crisp.prepare.importance import NeuronOrder, block_contributions, neuron_scores, permutations
from crisp.prepare.roles import (
    Exact,
    Grouped,
    Local,
    RoleMethod,
    local_increases,
    measure_increases,
    spell_method,
)
from crisp.prepare.saliency.rescaling import measure_rescaling
from crisp.prepare.saliency.sensitivities import TOKENS as SAMPLE
from crisp.prepare.saliency.sensitivities import measure_sensitivities
from crisp.prepare.width_losses import sample_windows
from crisp.profile import Profile, dominant
from crisp.profile.router_weights import QUANTILES, quantiles
from crisp.text_windows import TokenWindows

ROLES = Grouped()
TIERED = "tiered(.6,.9)"  # the paper's thresholds


class Study(Setting):
    """A model with the sums of its calibration text, and everything that follows from them."""

    @cached_property
    def sums(self) -> CalibrationSums:
        """The sums over all kinds of calibration text together."""
        return self.calibration()

    @cached_property
    def orders(self) -> Orders:
        """The neuron orders by importance (paper, Eq. 2)."""
        return self.order("importance", self.sums)

    @cached_property
    def increase(self) -> dict[int, npt.NDArray[np.float64]]:
        """The roles in the grouped form: by layer, [E, E]."""
        return self.roles(ROLES, self.amounts.roles)[0]

    @cached_property
    def prepared(self) -> Profile:
        """The profile with counts and measured roles, of all kinds of text together."""
        return self.profile(self.sums, self.increase)

    @cached_property
    def by_weight(self) -> Profile:
        """The same counts without measured roles: the router's weight decides."""
        return replace(self.prepared, dominant=None)

    @cached_property
    def weighed(self) -> Profile:
        """The profile with each block's contribution in `orders`, and the router's weights."""
        self.arrange(self.original)
        sizes = block_contributions(self.sums, self.orders, self.experts, BLOCK)
        layers, n = self.spec.n_layers, self.spec.n_experts
        blocks = np.zeros((layers, n, self.spec.n_blocks), np.float32)
        weights = np.zeros((layers, n, QUANTILES), np.float16)
        for layer, layer_sums in self.sums.layers.items():
            blocks[layer], weights[layer] = sizes[layer], quantiles(layer_sums.weighted)
        return replace(self.by_weight, contributions=blocks, router_weights=weights)

    @cached_property
    def salient(self) -> Profile:
        """The same with rescaling and sensitivities, as `crisp prepare` measures them."""
        file, profile = self.work / "saliency.npz", self.weighed
        if not file.exists():
            self.tell("rescaling and sensitivities")
            self.arrange(self.orders)
            model, contributions = self.loaded.model, profile.contributions
            assert contributions is not None
            text = self.windows("calibration", KINDS.values(), self.amounts.calibration)
            factors = measure_rescaling(model, text, BLOCK)
            sizes = dict(enumerate(contributions))
            sample = sample_windows(text, SAMPLE)
            sensitive = measure_sensitivities(model, sample, BLOCK, sizes, factors)
            rescaling = np.ones((*contributions.shape[:2], self.spec.n_blocks + 1), np.float32)
            sensitivities = np.zeros(self.spec.n_layers, np.float32)
            for layer, of_layer in factors.items():
                rescaling[layer], sensitivities[layer] = of_layer, sensitive[layer]
            with atomic(file) as temporary, temporary.open("wb") as stream:
                np.savez(stream, rescaling=rescaling, sensitivities=sensitivities)
        with np.load(file) as kept:
            return replace(profile, **{name: kept[name] for name in kept.files})

    @cached_property
    def full(self) -> Reading:
        """The reading at full width, with which everything is compared."""
        return self.read("full", self.orders)

    @cached_property
    def routed(self) -> Routes:
        """The full model's routing of some calibration text, for thresholds."""
        text = self.windows("calibration", KINDS.values(), self.amounts.masking)
        self.arrange(self.orders)
        return self.routes(text)

    def facts(self) -> dict[str, Any]:
        """Return the conditions under which the figures of this model were measured."""
        texts = [*self.heldout.dataset, *(windows.dataset[0] for windows in self.samples.values())]
        return {
            "name": self.spec.name,
            "run": self.loaded.how,
            "weights": self.weights,
            "spec": self.spec.to_dict(),
            "expert_bytes_per_token": self.full.bytes,
            "amounts": vars(self.amounts),
            "window": WINDOW,
            "block": BLOCK,
            "texts": texts,
            "scored": self.heldout.n_scored,
            "rare_experts": sum(
                int((layer.tokens * self.spec.n_experts < layer.tokens.sum() / 10).sum())
                for layer in self.sums.layers.values()
            ),
        }

    @property
    def pairs(self) -> bool:
        """Whether a combination is a pair, so that roles can be measured and decide."""
        return self.spec.top_k == 2

    def calibration(self, kinds: Iterable[str] = KINDS.values(), upto: int = 0) -> CalibrationSums:
        """Return the sums over the first ``upto`` windows of each of the kinds (0: all)."""
        return merged([self._chunk(kind, *cut) for kind in kinds for cut in self._cuts(kind, upto)])

    def points(self) -> list[int]:
        """Return the numbers of windows at which sums are kept: 2, 4, 8, ..."""
        most = min(len(windows.tokens) for windows in self.samples.values())
        return [2**i for i in range(1, most.bit_length()) if 2**i < most] + [0]

    def _cuts(self, kind: str, upto: int) -> list[tuple[int, int]]:
        """Return the runs of windows, from start to before end, whose sums are kept apart."""
        whole = len(self.samples[kind].tokens)
        ends = [end or whole for end in self.points()]
        ends = [end for end in ends if not upto or end <= upto]
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def _chunk(self, kind: str, start: int, end: int) -> CalibrationSums:
        """Return the sums of a run of windows, kept in the work folder."""
        file = self.work / f"calibration-{kind}-{start}-{end}.npz"
        if not file.exists():
            self.tell(f"calibration on {kind}, windows {start} to {end}")
            self.arrange(self.original)
            windows = subset(self.samples[kind], start, end)
            calibrate(self.loaded.model, windows).save(file)
        return CalibrationSums.load(file)

    def roles(
        self, method: RoleMethod, tokens: int
    ) -> tuple[dict[int, npt.NDArray[np.float64]], float]:
        """Return (increase by layer [E, E], seconds) on the first ``tokens`` of each kind."""
        assert isinstance(method, Exact | Grouped)
        file = self.work / f"roles-{spell_method(method)}-{tokens}.npz"
        if not file.exists():
            self.tell(f"roles {spell_method(method)} on {tokens} tokens of each kind")
            self.arrange(self.original)
            text, begin = self.windows("calibration", KINDS.values(), tokens), time.monotonic()
            increases = dict(measure_increases(method, self.loaded.model, text))
            seconds = time.monotonic() - begin
            arrays = {str(layer): increase for layer, increase in increases.items()}
            with atomic(file) as temporary, temporary.open("wb") as stream:
                np.savez(stream, seconds=np.array(seconds), **arrays)
        with np.load(file) as kept:
            by_layer = {int(name): kept[name] for name in kept.files if name != "seconds"}
            return by_layer, float(kept["seconds"])

    def profile(
        self, calibration: CalibrationSums, increase: Mapping[int, Any] | None = None
    ) -> Profile:
        """Return the counts, with measured roles where ``increase`` says them."""
        layers, n = self.spec.n_layers, self.spec.n_experts
        experts, pairs = np.zeros((layers, n), np.int64), np.zeros((layers, n, n), np.int64)
        for layer, sums in calibration.layers.items():
            experts[layer], pairs[layer] = sums.tokens, sums.pair_counts
        roles = None if increase is None else dominant(self.everywhere(increase))
        return Profile(experts, pairs, True, roles)

    def everywhere(self, by_layer: Mapping[int, Any]) -> npt.NDArray[np.float64]:
        """Return arrays by layer as one [decoder layers, E, E], NaN in layers that are not MoE."""
        n = self.spec.n_experts
        whole = np.full((self.spec.n_layers, n, n), np.nan)
        for layer, values in by_layer.items():
            whole[layer] = values
        return whole

    def local(self, calibration: CalibrationSums) -> dict[int, npt.NDArray[np.float64]]:
        """Return roles from the size of what is removed, by layer [E, E]."""
        return local_increases(Local(), calibration)

    def order(self, text: str, calibration: CalibrationSums) -> Orders:
        """Return the order spelled ``text``, from what calibration saw."""
        self.arrange(self.original)
        return permutations(neuron_scores(NeuronOrder.read(text), calibration, self.experts))


def subset(windows: TokenWindows, start: int, end: int) -> TokenWindows:
    """Return the windows from ``start`` to before ``end``."""
    parts = {name: getattr(windows, name)[start:end] for name in ("tokens", "scored", "text")}
    return replace(windows, **parts)


def merged(parts: Sequence[CalibrationSums]) -> CalibrationSums:
    """Return the sums of several texts added up."""
    layers = {
        layer: LayerSums(
            **{
                name: sum(getattr(part.layers[layer], name) for part in parts)
                for name in vars(sums)
            }
        )
        for layer, sums in parts[0].layers.items()
    }
    return CalibrationSums(
        layers, sum(part.windows for part in parts), sum(part.tokens for part in parts)
    )
