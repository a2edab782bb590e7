"""Additions to the policy saliency: what each gains at the same loss, on text not chosen on.

    python benchmarks/policies --data DIR --additions

measures them and writes docs/policies.md anew. *Predicted magnitudes* are built (`--magnitude
predicted`), the others were tried here alone:

- sensitivities by gradient: the size of the gradient of the loss (of tokens drawn from the model's
  own prediction) by a layer's routed output, from one backward pass, in the place of ablation;
- accumulated skipping: a token's missing blocks below the threshold are left out, least first, only
  while their sum stays below so many thresholds, so that many small ones do not add up;
- int3 beside int4: the share of blocks of least worth (frequency x size) in 3 bits, all else in 4,
  groups of 32. As many more blocks are held as those that a cache of this budget holds are smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from benchmarks.policies.choosing import MARK, SPARE
from benchmarks.policies.reading import Bench, Reading, over
from benchmarks.quality.setting import KINDS
from crisp.adapter import attach, execute, expert_layout, intercept_experts
from crisp.adapter.experts import Experts
from crisp.extras import import_extra
from crisp.policy import BoundWidths, Budget, Policy, named
from crisp.policy.retention import block_sizes, expected_weights, routed_weights
from crisp.policy.widths.base import Widths
from crisp.policy.widths.contribution import ResidentThresholdWidths, as_bits, row_on
from crisp.prepare.saliency.magnitudes import TOKENS as MAGNITUDES_TOKENS
from crisp.prepare.saliency.magnitudes import measure_magnitudes
from crisp.prepare.saliency.sensitivities import TOKENS
from crisp.prepare.width_losses import sample_windows
from crisp.quality import score_windows
from crisp.scheduler.retention import Routed
from crisp.scheduler.tasks import Task
from crisp.scheduler.untimed import NewReplay, Replay
from crisp.scheduler.workload import union

BUDGETS = ("10%", "20%")
TRIED = "tiny-mixtral", "20%"  # where what is not built was measured
SHARES = {
    "tiny-mixtral": (".6", ".575", ".55", ".525", ".5", ".475", ".45", ".425", ".4"),
    "tiny-deepseek": (".35", ".325", ".3", ".275", ".25", ".225", ".2", ".175", ".15"),
}
LOSS = 0.027  # at which bytes are compared
SUM = 8  # thresholds that a token may leave out in a layer
LITTLE = 0.25  # of the blocks: those of least worth, in 3 bits
GROUP = 32  # weights with one scale of 16 bits
PREDICTED = "predicted magnitudes"
Floats = npt.NDArray[np.float64]
Follow = Callable[[str], Reading]


def measure(bench: Bench) -> dict[str, Any]:
    """Return what additions gain in one model; those that are not built in one budget alone."""
    name = bench.spec.name
    text = bench.study.windows("calibration", KINDS.values(), bench.study.amounts.calibration)
    found = measure_magnitudes(bench.study.loaded.model, sample_windows(text, MAGNITUDES_TOKENS))
    spec = bench.spec
    magnitudes = np.zeros((spec.n_layers, spec.n_experts, spec.d_model + 1), np.float16)
    for layer, coefficients in found.items():
        magnitudes[layer] = coefficients
    bench.profile = replace(bench.profile, magnitudes=magnitudes)
    built, tried = [], []
    for budget in BUDGETS:
        for magnitude in ("none", "predicted"):
            built.append(_chosen(bench, budget, magnitude))
    if name == TRIED[0]:
        tried = _tried(bench, TRIED[1])
    return {"name": name, "built": built, "tried": tried}


def _chosen(bench: Bench, budget: str, magnitude: str) -> dict[str, Any]:
    """Return what is chosen on one text, on another; and the bytes there at `LOSS`."""
    shares = SHARES[bench.spec.name]

    def read(share: str, part: Any) -> Reading:
        return bench.read(_policy(share, magnitude), budget, part)

    full_tuning = bench.read(named("lru"), budget, bench.tuning)
    full = bench.read(named("lru"), budget, bench.heldout)
    readings = {share: read(share, bench.tuning) for share in shares}
    allowed = [
        share
        for share, one in readings.items()
        if one.loss(full_tuning)["interval"][1] <= SPARE * MARK
    ]
    share = min(allowed, key=lambda share: readings[share].bytes)
    reported = read(share, bench.heldout)
    bench.tell(f"{budget} magnitude {magnitude}: saliency({share}) chosen")
    curve = _curve(shares[::2], full, lambda one: read(one, bench.heldout))
    return {
        "budget": budget,
        "magnitude": magnitude,
        "share": share,
        "bytes": reported.bytes,
        "loss": reported.loss(full),
        "over_lru": over(reported, full),
        "bytes_at_loss": _at(curve),
    }


def _tried(bench: Bench, budget: str) -> list[dict[str, Any]]:
    shares = SHARES[bench.spec.name][2:8:2]  # around LOSS
    full = bench.read(named("lru"), budget, bench.heldout)

    def saliency(share: str) -> Reading:
        return bench.read(_policy(share), budget, bench.heldout)

    plain, usual = _curve(shares, full, saliency), bench.profile
    bench.profile = replace(usual, sensitivities=by_gradient(bench))
    gradient = _curve(shares, full, saliency)
    bench.profile = usual
    bench.tell("sensitivities by gradient read")
    adding = _curve(shares, full, lambda one: _follow(bench, budget, AccumulatingReplay, one))
    bench.tell("accumulated skipping read")
    in_bits = []
    for share in (0.0, LITTLE):
        few = _least(bench, share)
        with quantised(bench, few):
            in_bits.append(_curve(shares, full, _follow_bits(bench, budget, few)))
        bench.tell(f"int3 for {share:.0%} read")
    return [
        {"budget": budget, "addition": name, "over": _at(with_it) / _at(without)}
        for name, without, with_it in (
            ("sensitivities by gradient", plain, gradient),
            (f"accumulated skipping, at most {SUM} thresholds", plain, adding),
            (f"int3 for {LITTLE:.0%} of the blocks, over int4 alone", *in_bits),
        )
    ]


def _policy(share: str, magnitude: str = "none") -> Policy:
    return named("saliency", width=f"saliency({share})", magnitude=magnitude)


def _curve(shares: Sequence[str], full: Reading, follow: Follow) -> Floats:
    """Return (loss, bytes) at each share, by rising loss."""
    readings = [follow(share) for share in shares]
    curve = np.array([(one.losses(full)[0], one.bytes) for one in readings])
    return curve[curve[:, 0].argsort()]


def _at(curve: Floats) -> float:
    """Return the bytes at `LOSS`, in logarithms between (or beyond) the two nearest points."""
    place = int(np.clip(np.searchsorted(curve[:, 0], LOSS), 1, len(curve) - 1))
    (low, few), (high, many) = curve[place - 1], curve[place]
    along = (LOSS - low) / (high - low)
    return float(np.exp(np.log(few) * (1 - along) + np.log(many) * along))


def _follow(bench: Bench, budget: str, replay: NewReplay, share: str) -> Reading:
    """Read the held-out text with a cache followed by ``replay``."""
    model, loaded = bench.study.loaded.model, [0]
    with attach(
        model, _policy(share), bench.profile, spec=bench.spec, budget=Budget.parse(budget),
        replay=replay,
    ) as attached:  # fmt: skip

        def note(done: int, total: int) -> None:
            loaded.append(attached.tally.blocks_loaded or 0)

        scores = score_windows(model, bench.heldout, note, batch=1)
    return Reading(scores, np.diff(loaded), bench.heldout.n_fed, bench.spec.block_bytes)


# -- accumulated skipping --------------------------------------------------------------------------


class AccumulatingReplay(Replay):
    """A `Replay` in which what a token leaves out of a layer adds up, to `SUM` thresholds."""

    def rows(
        self,
        layer: int,
        experts: npt.NDArray[np.int16],
        weights: npt.NDArray[np.float16],
        widths: BoundWidths,
        magnitudes: npt.NDArray[np.float16] | None = None,
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
            upto = int(np.searchsorted(small.cumsum(), SUM * least, "right"))
            loaded = worth >= (small[upto] if upto < len(small) else least)
            found.append(row_on(row, resident, as_bits(loaded).tolist()))
            routed = routed_weights([row], weights[place : place + 1])
            self.run(layer, union([row], [found[place]]), routed)
        return np.array(found, np.int16).reshape(experts.shape)


# -- int3 beside int4 ------------------------------------------------------------------------------


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


def _follow_bits(bench: Bench, budget: str, few: npt.NDArray[np.bool_]) -> Follow:
    """Read as `_follow` does; bytes by the bits of each block (few: 3, else 4) and its scales."""
    bits = np.where(few, 3, 4) + 16 / GROUP
    counts = {name: np.zeros(few.shape, np.int64) for name in ("loads", "held")}
    kind = type("Counting", (CountingReplay,), counts)

    def run(share: str, more: float) -> Reading:
        """Run with a budget of so many times the blocks."""
        for count in counts.values():
            count[:] = 0
        return _follow(bench, f"{float(budget.strip('%')) * more:.4f}%", kind, share)

    def read(share: str) -> Reading:
        more = 1.0
        if few.any():
            run(share, 1)
            more = 4.5 * counts["held"].sum() / (counts["held"] * bits).sum()
        reading, loads = run(share, more), counts["loads"]
        of_block = float((loads * bits).sum() / loads.sum()) / 32
        return replace(reading, block_bytes=bench.spec.block_bytes * of_block)  # type: ignore[arg-type]

    return read


def _least(bench: Bench, share: float) -> npt.NDArray[np.bool_]:
    """Return which blocks [layers, experts, blocks] are the share of least frequency x size."""
    spec = bench.spec
    expected = np.array(expected_weights(spec, bench.profile), float)
    sizes = np.array(block_sizes(spec, bench.profile), float).reshape(len(expected), -1)
    worth = expected[:, None] * sizes
    found = np.zeros((spec.n_layers, spec.n_experts, spec.n_blocks), bool)
    least = worth <= np.quantile(worth, share) if share else np.zeros(worth.shape, bool)
    found[list(spec.moe_layers)] = least.reshape(len(spec.moe_layers), spec.n_experts, -1)
    return found


@contextmanager
def quantised(bench: Bench, few: npt.NDArray[np.bool_]) -> Iterator[None]:
    """Round the weights of routed experts to 4 bits, of the blocks ``few`` to 3, within the block.

    Groups of 32 neighbours share a scale, the largest magnitude's; values are symmetric around 0.
    """
    torch, saved = import_extra("torch"), []
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


# -- sensitivities by gradient ---------------------------------------------------------------------


def by_gradient(bench: Bench) -> npt.NDArray[np.float32]:
    """Return each layer's root mean square gradient by its routed experts' output: [layers]."""
    torch, model = import_extra("torch"), bench.study.loaded.model
    layout = expert_layout(model)
    experts = [Experts.of(layer) for layer in layout.layers]
    text = bench.study.windows("calibration", KINDS.values(), TOKENS)
    windows, squares = sample_windows(text, TOKENS), np.zeros(bench.spec.n_layers)
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
