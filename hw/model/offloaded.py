"""Run a transformers model's routed experts in an executor: what its routers choose becomes events.

The model computes attention, routers, shared experts and its head; a routed expert is a task, whose
output comes back summed with the router's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.adapter import (
    RecordedRouting,
    check_rescaling,
    intercept_experts,
    look_ahead,
    predictor,
)
from crisp.adapter.routing import router_scores
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.hw.devices.batch import expert_batches
from crisp.hw.executor import Executor
from crisp.hw.model.lookup import HostLookup, RouterChoice, WidthLookup
from crisp.hw.model.resident import ResidentModel
from crisp.hw.store.reader import TORCH_TYPES
from crisp.model.quantization import BITS
from crisp.policy.magnitude import weighed
from crisp.policy.prefetch import ROUTER
from crisp.policy.rescaling import factors, rescaling
from crisp.policy.retention import routed_weights
from crisp.run.case import Case
from crisp.scheduler.workload import Step, union
from crisp.trace import DECODE, PREFILL


class OffloadedExperts:
    """The forward passes of one sequence, as steps and events of an executor; records routing."""

    def __init__(
        self,
        model: ResidentModel,
        case: Case,
        executor: Executor,
        prompt: int,
        prompt_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """case: gives policy and profile. prompt: the number of its tokens. prompt_ended: called
        when all of them have been run.
        """
        self._prompt_ended = prompt_ended
        self._model, self._executor, self._prompt = model, executor, prompt
        self._layers, self._experts = model.layout.layers, case.spec.n_experts
        own = model.loaded.model.dtype  # for a quantised store, which has no type of its own
        quantised = model.store.dtype in BITS
        self._kind = (
            own if quantised else getattr(import_extra("torch"), TORCH_TYPES[model.store.dtype])
        )
        self._widths = case.policy.width.bind(case.spec, case.profile, True)
        device = executor.device
        self._lookup = (
            HostLookup(case.spec)
            if device.host_memory
            else WidthLookup(case.spec, self._widths, device.upload, device.fetch)
        )
        self._rescaling = rescaling(case.spec, case.profile) if case.policy.rescales else None
        self._routing = router_scores(model.layout, case.policy, case.spec, case.profile)
        self._magnitudes = predictor(case.policy, case.spec, case.profile)
        self._guesses = case.policy.prefetch.source == ROUTER
        self._check_calls(case)
        self._passes: list[RecordedRouting] = []
        self._shape = model.layout.n_layers, case.spec.top_k
        self._step: Step | None = None  # of the current pass
        self._turn = len(self._layers)  # the MoE layer that comes next
        self._heard: tuple[Any, Any] | None = None  # that layer's router, asked ahead
        self._widths_ns = 0  # spent on widths that the lookup left to the policy
        self.skipped = 0  # (token, expert) pairs of width 0

    def _check_calls(self, case: Case) -> None:
        """Raise CrispError for what a model's way of calling its experts does not allow."""
        name = self._model.loaded.name
        if self._guesses and any(layer.block is None for layer in self._layers):
            raise CrispError(
                f"policy {case.policy.name}: prefetch {case.policy.prefetch.name} asks routers "
                f"ahead, but those of {name} cannot be asked alone; previous or none was expected"
            )
        check_rescaling(case.policy, self._model.layout)
        if case.spec.top_k > 1 and any(layer.scales_inputs for layer in self._layers):
            raise CrispError(
                f"{name}: its router's weights multiply the inputs of {case.spec.top_k} experts a "
                "token; not understood"
            )

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let the model run its experts in the executor, within the block."""
        model, layout = self._model.loaded.model, self._model.layout
        hook = model.register_forward_pre_hook(self._begin, with_kwargs=True)
        try:
            with ExitStack() as stack:
                stack.enter_context(intercept_experts(layout, self._run))
                if self._guesses:
                    stack.enter_context(look_ahead(layout, self._hear))
                if self._routing is not None:
                    stack.enter_context(self._routing.observed())
                yield
        finally:
            hook.remove()

    @property
    def lookup_ns(self) -> int:
        """The time spent on finding widths so far in ns, without waiting for the routers."""
        return self._lookup.own_ns + self._widths_ns

    def end(self) -> None:
        """End the last pass."""
        self._check_complete()
        self._executor.end_step(self._step)

    def routing(self) -> RecordedRouting:
        """Return the routing of every token that was fed; guesses are -1 where none were asked."""
        none = RecordedRouting(*empty(0, *self._shape))
        names = ("experts", "weights", "guess")
        parts = [[getattr(one, name) for one in (none, *self._passes)] for name in names]
        predicted = [one.magnitudes for one in self._passes if one.magnitudes is not None]
        experts, weights, guess = map(np.concatenate, parts)
        magnitudes = np.concatenate(predicted) if predicted else None
        return RecordedRouting(experts, weights, guess, magnitudes=magnitudes)

    def _begin(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a step: the hook before a forward pass."""
        self._check_complete()
        self._executor.end_step(self._step)
        tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        first = 0 if self._step is None else self._step.rows[-1] + 1
        rows = range(first, first + tokens.numel())
        prefill = first < self._prompt
        if first == self._prompt:
            self._prompt_ended()
        opens, closes = first == 0, prefill and rows.stop == self._prompt
        self._step = Step(rows, PREFILL if prefill else DECODE, opens, closes)
        magnitudes = None
        if self._magnitudes is not None:
            magnitudes = np.ones((len(rows), *self._shape), np.float16)
        self._passes.append(RecordedRouting(*empty(len(rows), *self._shape), magnitudes=magnitudes))
        self._turn = 0

    def _check_complete(self) -> None:
        """Raise CrispError if the last pass has left out a MoE layer."""
        if self._turn < len(self._layers):
            name = self._layers[self._turn].name
            raise CrispError(f"{name}: was not called in the forward pass; not understood")

    def _hear(self, which: int, index: Any, weights: Any) -> None:
        """Keep the answer of a layer's router to the input of the MoE layer before."""
        self._heard = index, weights

    def _run(self, which: int, hidden: Any, index: Any, weights: Any, _: Any) -> Any:
        """Run a MoE layer's experts as an event and return their output: the adapter's handler.

        hidden: [n, d_model]; index, weights: the router's, [n, k].
        """
        layer, executor = self._layers[which], self._executor
        if which != self._turn:
            raise CrispError(f"{layer.name}: was called out of its turn; not understood")
        self._turn += 1
        inputs = hidden.detach()
        if layer.scales_inputs:  # the one expert's
            inputs = inputs * weights
        inputs = inputs.to(self._kind)  # before the wait, so that nothing follows it
        chosen = self._lookup(which, layer.name, index, weights, self._heard)
        self._heard = None
        looks = self._widths.residency or self._routing is not None
        with executor.at_rest() if looks else nullcontext():
            start, ids, widths, w = self._start(which, hidden, inputs, chosen)
        out = start()  # [n, d_model]
        bias = self._model.biases[which]
        if bias is not None:  # of the down projection: part of every width
            out = out + executor.device.upload(self._shares(ids, widths, w)) @ bias
        return out.to(hidden)

    def _start(
        self, which: int, hidden: Any, inputs: Any, chosen: RouterChoice
    ) -> tuple[Callable[[], Any], npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.float32]]:
        """Decide a layer's widths and begin its event.

        hidden, inputs: [n, d_model], the layer's input and that of the experts. Returns what gives
        the event's outputs, and the experts, widths in blocks and weights, [n, k] each.
        """
        layer, executor = self._layers[which], self._executor
        ids, w, widths = chosen.experts, chosen.weights, chosen.widths
        half = w.astype(np.float16)  # as a trace has them, so that both decide alike
        if self._routing is not None:
            router, scores = ids, self._routing.take(which, len(ids))
            on_device = executor.residents(layer.index)
            ids, half = self._routing.choose(which, scores, router, half, on_device)
            w = np.where((ids != router).any(axis=1)[:, None], half.astype(np.float32), w)
            self.skipped += int((router >= 0).sum() - (ids >= 0).sum())
            widths = None  # those that came along are of the router's choice
        worth: npt.NDArray[np.floating[Any]] = half
        if self._magnitudes is not None:
            magnitudes = self._magnitudes.of(layer.index, hidden, ids)
            worth = weighed(half, magnitudes)
        routing = self._passes[-1]
        routing.experts[:, layer.index, : ids.shape[1]] = ids
        routing.weights[:, layer.index, : ids.shape[1]] = w
        if self._magnitudes is not None:
            assert routing.magnitudes is not None
            routing.magnitudes[:, layer.index, : ids.shape[1]] = magnitudes
        if chosen.guess is not None:
            following = self._layers[which + 1].index
            routing.guess[:, following, : chosen.guess.shape[1]] = chosen.guess
        if widths is None:
            resident = executor.residents(layer.index) if self._widths.residency else None
            begin = perf_counter_ns()
            widths = self._widths.widths(layer.index, ids, worth, resident)
            self._widths_ns += perf_counter_ns() - begin
        self.skipped += int(((widths == 0) & (ids >= 0)).sum())
        tasks = union(ids.tolist(), widths.tolist())
        routed = routed_weights(ids.tolist(), half) if executor.scheduler.weighs else None
        if layer.scales_inputs:
            w = np.ones_like(w)
        if self._rescaling is not None:
            w = w * factors(self._rescaling[layer.index], ids, widths)
        guess = () if chosen.guess is None else chosen.guess.ravel().tolist()
        make_batches = partial(expert_batches, ids, widths, w, executor.device.place(inputs))
        start = executor.event(layer.index, tasks, guess, routed, make_batches, len(ids))
        return start, ids, widths, w

    def _shares(
        self, ids: npt.NDArray[Any], widths: npt.NDArray[Any], weights: npt.NDArray[np.float32]
    ) -> Any:
        """Return the router's weight of every expert that is executed: float32 [n, experts]."""
        shares = np.zeros((len(ids), self._experts + 1), np.float32)  # the last column: no expert
        np.put_along_axis(shares, ids.astype(np.int64), np.where(widths > 0, weights, 0), 1)
        return import_extra("torch").from_numpy(shares[:, :-1])


def empty(rows: int, layers: int, k: int) -> tuple[Any, Any, Any]:
    """Return empty (experts, weights, guess) of a routing, [rows, layers, k] each."""
    none = np.full((rows, layers, k), -1, np.int16)
    return none, np.zeros(none.shape, np.float32), none.copy()
