"""Additions to the policy saliency that were tried and not built: what they gain on other text.

    python benchmarks/policies --data DIR --additions

- accumulated skipping: a token's blocks below the threshold are left out, least first, only while
  their sum stays below so many thresholds, so that many small ones do not add up;
- sensitivities by gradient: the size of the gradient of the loss (of tokens drawn from the model's
  own prediction) by a layer's routed output, from one backward pass, in the place of ablation;
- int3 beside int4: the share of blocks of least worth (frequency x size) in 3 bits, all else in 4,
  groups of 32. As many more blocks are held as those that a cache of this budget holds are
  smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from benchmarks.policies.reading import HELDOUT, Bench, Reading
from benchmarks.quality.setting import KINDS
from crisp.adapter import attach, execute, expert_layout, intercept_experts
from crisp.adapter.experts import Experts
from crisp.policy import BoundWidths, Budget, named
from crisp.policy.retention import block_sizes, expected_weights, routed_weights
from crisp.policy.widths.base import Widths
from crisp.policy.widths.contribution import ResidentThresholdWidths, as_bits, row_on
from crisp.policy.widths.saliency import Saliency
from crisp.prepare.saliency.sensitivities import TOKENS
from crisp.prepare.width_losses import sample_windows
from crisp.quality import score_windows
from crisp.scheduler.retention import Routed
from crisp.scheduler.tasks import Task
from crisp.scheduler.untimed import NewReplay, Replay
from crisp.scheduler.workload import union
from crisp.sim.fast_replay import compiled_replay

BUDGETS = ("10%", "20%")
SHARES = {
    "tiny-mixtral": (".6", ".55", ".525", ".5", ".475", ".45", ".425"),
    "tiny-deepseek": (".4", ".35", ".3", ".25", ".225", ".2", ".175"),
}
LOSSES = (0.018, 0.027)  # at which bytes are compared
SUMS = (4, 8)  # thresholds that a token may leave out in a layer
LITTLE = (0.25, 0.5)  # of the blocks: those of least worth, in 3 bits
GROUP = 32  # weights with one scale of 16 bits
Floats = npt.NDArray[np.float64]
Follow = Callable[[float], Reading]


class AccumulatingReplay(Replay):
    """A `Replay` in which what a token leaves out of a layer adds up."""

    most = 0.0  # thresholds

    def rows(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.float16],
        widths: BoundWidths,
    ) -> Widths:
        """Run an event for each of a layer's rows."""
        rule, found = cast(ResidentThresholdWidths, widths), []
        least = float(rule.thresholds[layer])
        for place, row in enumerate(experts.tolist()):
            resident = self.resident(layer)
            worth = weights[place, :, None].astype(float) * rule.contributions[layer][row]
            on_device = np.array([resident[expert] for expert in row])[:, None]
            missing = np.arange(worth.shape[1]) >= on_device
            small = np.sort(worth[missing & (worth < least)])
            upto = np.searchsorted(small.cumsum(), self.most * least, "right")
            loaded = worth >= (small[upto] if upto < len(small) else least)
            found.append(row_on(row, resident, as_bits(loaded).tolist()))
            routed = routed_weights([row], weights[place : place + 1])
            self.run(layer, union([row], [found[place]]), routed)
        return np.array(found, np.int16).reshape(experts.shape)


class CountingReplay(Replay):
    """A `Replay` that counts how often each block is loaded, and in how many events it is held."""

    loads: npt.NDArray[np.int64]  # [layers, experts, blocks]
    held: npt.NDArray[np.int64]

    def run(self, layer: int, tasks: list[Task], routed: Routed | None = None) -> None:
        """Run one event."""
        scheduler, blocks = self.scheduler, np.arange(self.held.shape[2])
        self.held[layer] += blocks < np.array(self.resident(layer))[:, None]
        scheduler.start(layer, tasks, (), routed)
        while not scheduler.done:
            load = scheduler.next_load()
            if load is not None:
                self.loads[layer, load.expert, load.first : load.first + load.blocks] += 1
                scheduler.loaded(load)
            while (task := scheduler.next_compute()) is not None:
                scheduler.computed(task)


def measure(bench: Bench) -> list[dict[str, Any]]:
    """Return kB a token of each addition at the same loss as without, and the ratio of both."""
    rows = []
    shares = SHARES[bench.spec.name]
    full = bench.read(named("lru"), BUDGETS[0], bench.heldout)
    gradient = replace(bench.profile, sensitivities=by_gradient(bench))
    for budget in BUDGETS:
        plain = _curve(bench, shares, full, _follow(bench, budget, compiled_replay))
        tried = {"sensitivities by gradient": _follow(bench, budget, compiled_replay, gradient)}
        for most in SUMS:
            kind = type("Accumulating", (AccumulatingReplay,), {"most": float(most)})
            tried[f"at most {most} thresholds left out"] = _follow(bench, budget, kind)
        for name, follow in tried.items():
            rows.append(_row(bench, budget, name, plain, _curve(bench, shares, full, follow)))
        rows += _mixed(bench, budget, shares, full)
    return rows


def _mixed(bench: Bench, budget: str, shares: Sequence[str], full: Reading) -> list[dict[str, Any]]:
    """Return the rows of int3 beside int4, over int4 alone."""
    rows, plain = [], None
    for little in (0.0, *LITTLE):
        few = _least(bench, little)
        with quantised(bench, few):
            curve = _curve(bench, shares, full, _follow_bits(bench, budget, few))
        if plain is None:
            plain = curve
        else:
            rows.append(_row(bench, budget, f"int3 for {little:.0%}, over int4", plain, curve))
    return rows


def _row(bench: Bench, budget: str, name: str, plain: Floats, curve: Floats) -> dict[str, Any]:
    """Return what an addition loads, at each loss."""
    row: dict[str, Any] = {"budget": budget, "addition": name}
    for loss in LOSSES:
        before, after = (_at(points, loss) for points in (plain, curve))
        row[f"{loss:.1%}"] = {"bytes": after, "over": after / before}
    bench.tell(f"{row}")
    return row


def _at(curve: Floats, loss: float) -> float:
    """Return the bytes [at a loss] of a curve [points, (loss, bytes)], in logarithms between."""
    curve = curve[curve[:, 0].argsort()]
    if not curve[0, 0] <= loss <= curve[-1, 0]:
        return float("nan")
    return float(np.exp(np.interp(loss, curve[:, 0], np.log(curve[:, 1]))))


def _curve(bench: Bench, shares: Sequence[str], full: Reading, follow: Follow) -> Floats:
    """Return (loss, bytes) at each share."""
    readings = [follow(float(share)) for share in shares]
    return np.array([(one.losses(full)[0], one.bytes) for one in readings])


def _follow(bench: Bench, budget: str, replay: NewReplay, profile: Any = None) -> Follow:
    def read(share: float) -> Reading:
        policy = replace(named("saliency"), width=Saliency(Fraction(str(share))))
        loaded = [0]
        with attach(
            bench.study.loaded.model, policy, profile or bench.profile, spec=bench.spec,
            budget=Budget.parse(budget), replay=replay,
        ) as attached:  # fmt: skip

            def note(done: int, total: int) -> None:
                loaded.append(attached.tally.blocks_loaded or 0)

            scores = score_windows(bench.study.loaded.model, bench.heldout, note, batch=1)
        spec, fed = bench.spec, bench.heldout.n_fed
        return Reading(scores, np.diff(loaded), fed, spec.block_bytes)

    return read


def _follow_bits(bench: Bench, budget: str, few: npt.NDArray[np.bool_]) -> Follow:
    """Read as `_follow` does; bytes by the bits of each block (few: 3, else 4) and its scales."""
    bits = np.where(few, 3, 4) + 16 / GROUP
    counts = {name: np.zeros(few.shape, np.int64) for name in ("loads", "held")}
    kind = type("Counting", (CountingReplay,), counts)

    def run(share: float, more: float) -> Reading:
        """Run with a budget of so many times the blocks."""
        for count in counts.values():
            count[:] = 0
        return _follow(bench, f"{float(budget.strip('%')) * more:.4f}%", kind)(share)

    def read(share: float) -> Reading:
        more = 1.0
        if few.any():
            run(share, 1)
            more = 4.5 * counts["held"].sum() / (counts["held"] * bits).sum()
        reading, loads = run(share, more), counts["loads"]
        size = bench.spec.block_bytes * float((loads * bits).sum() / loads.sum()) / 32
        return replace(reading, block_bytes=size)  # type: ignore[arg-type]

    return read


def _least(bench: Bench, share: float) -> npt.NDArray[np.bool_]:
    """Return which blocks [layers, experts, blocks] are the share of least frequency x size."""
    spec, profile = bench.spec, bench.profile
    assert profile.contributions is not None
    expected = np.array(expected_weights(spec, profile), float)
    sizes = np.array(block_sizes(spec, profile), float).reshape(len(expected), -1)
    worth = expected[:, None] * sizes
    found = np.zeros(profile.contributions.shape, bool)
    least = worth <= np.quantile(worth, share) if share else np.zeros(worth.shape, bool)
    found[list(spec.moe_layers)] = least.reshape(len(spec.moe_layers), spec.n_experts, -1)
    return found


@contextmanager
def quantised(bench: Bench, few: npt.NDArray[np.bool_]) -> Iterator[None]:
    """Round the weights of routed experts to 4 bits, of the blocks ``few`` to 3, within the block.

    Groups of 32 neighbours share a scale, the largest magnitude's; values are symmetric around 0.
    """
    torch = _torch()
    saved = []
    with torch.no_grad():
        for layer, experts in bench.study.experts.items():
            for expert in range(experts.n_experts):
                up, down = experts.neurons(expert)  # [2, d_ff, d_model], [d_ff, d_model]
                little = torch.from_numpy(np.repeat(few[layer, expert], bench.spec.block))
                for matrix in (*up, down):
                    saved.append((matrix, matrix.clone()))
                    steps = torch.where(little[: len(matrix)], 3.0, 7.0)[:, None, None]
                    groups = matrix.reshape(len(matrix), -1, GROUP)
                    scale = (groups.abs().amax(-1, keepdim=True) / steps).clamp(min=1e-12)
                    matrix.copy_(((groups / scale).round() * scale).reshape(matrix.shape))
    try:
        yield
    finally:
        with torch.no_grad():
            for matrix, before in saved:
                matrix.copy_(before)


def by_gradient(bench: Bench) -> npt.NDArray[np.float32]:
    """Return each layer's root mean square gradient by its routed experts' output: [layers]."""
    torch, model = _torch(), bench.study.loaded.model
    layout = expert_layout(model)
    experts = [Experts.of(layer) for layer in layout.layers]
    windows = sample_windows(bench.study.windows("calibration", KINDS.values(), HELDOUT), TOKENS)
    squares = np.zeros(bench.spec.n_layers)
    added: dict[int, Any] = {}

    def handler(which: int, hidden: Any, index: Any, weights: Any, _: Any) -> Any:
        added[which] = torch.zeros_like(hidden).requires_grad_()
        return execute(experts[which], hidden, index, weights) + added[which]

    draw = torch.Generator().manual_seed(0)
    with intercept_experts(layout, handler):
        for window in windows.tokens:
            ids = torch.from_numpy(np.asarray(window))[None].long()
            logs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            drawn = torch.multinomial(logs.detach().exp(), 1, generator=draw)
            parts = [added[which] for which in range(len(layout.layers))]
            gradients = torch.autograd.grad(-logs.gather(1, drawn).sum(), parts)
            for layer, gradient in zip(layout.layers, gradients, strict=True):
                squares[layer.index] += float(gradient.double().square().sum())
    return np.sqrt(squares / windows.n_fed).astype(np.float32)


def _torch() -> Any:
    from crisp.extras import import_extra

    return import_extra("torch")
