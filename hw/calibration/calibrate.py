"""calibrate(): a measured hardware profile of a device, for the blocks of one store.

Each stream is timed alone and while the other is kept busy, in rounds that take every size once, in
random order, so that what drifts meanwhile touches all sizes alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.hardware.measured import TimeCurve
from crisp.hw.calibration.host_time import host_times
from crisp.hw.calibration.layer_time import layer_times
from crisp.hw.calibration.stopwatch import Operation, TimedChain
from crisp.hw.calibration.tables import DeviceTimes, Key, tabulated
from crisp.hw.devices.batch import ExpertBatch
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.devices.protocol import BlockRange, Copy, Device
from crisp.hw.model.resident import ResidentModel
from crisp.hw.store.reader import TORCH_TYPES, Store

ROWS = (1, 2, 4, 16, 64, 256)
_LEAST, _MOST, _VISIT_NS = 3, 16, 50_000_000  # operations, and their time, when a size is visited
_POOL_BYTES = 256_000_000  # enough that the processor's caches do not hold what is computed
_MOST_SECONDS = 3600
_SHARE = 6  # of the time: what the first look at all sizes of a table may take
_LONG = 30  # of the time: what one piece may take, when there are
_FEWEST = 3  # or more numbers of rows


def pool_slots(store: Store) -> int:
    """Slots of a device that is to be calibrated: an expert or more for each stream."""
    return 2 * max(store.spec.n_blocks, _POOL_BYTES // 2 // store.spec.block_bytes)


def check_seconds(seconds: float) -> None:
    """Raise CrispError unless something can be measured in so many."""
    if not 0 < seconds <= _MOST_SECONDS:
        raise CrispError(f"seconds {seconds:g}: must be above 0 and at most {_MOST_SECONDS}")


def least_seconds(store: Store, link_limit: int) -> float:
    """What loading takes at so many bytes a second, when everything is looked at once.

    Raises CrispError for more than may be asked for.
    """
    blocks = pool_slots(store) // 2 + 2 * _LEAST * sum(_points(store.spec.n_blocks, 1, 0))
    seconds = blocks * store.spec.block_bytes / link_limit
    if seconds > _MOST_SECONDS:
        raise CrispError(f"link limit {link_limit}: it would take {seconds:,.0f} seconds at least, "
                         f"{_MOST_SECONDS} were expected at most")  # fmt: skip
    return seconds


def calibrated(
    store: Store,
    options: DeviceOptions,
    seconds: float = 60,
    progress: Callable[[float], None] | None = None,
    model: ResidentModel | None = None,
) -> DeviceTimes:
    """Open a device for a store and measure it; as `calibrate`.

    model: the layers' time is that of its attention, routers and all else; None: of a replay,
    which has none.
    """
    layer = host_times(store, options) if model is None else layer_times(model, options)
    with closing(options.open(store, pool_slots(store))) as device:
        return calibrate(
            device, store, layer, activations(store), seconds=seconds, progress=progress,
            model=None if model is None else model.loaded.name,
        )  # fmt: skip


def calibrate(
    device: Device,
    store: Store,
    layer: TimeCurve,
    hidden: Callable[[int], Any],
    *,
    seconds: float = 60,
    progress: Callable[[float], None] | None = None,
    model: str | None = None,
) -> DeviceTimes:
    """Measure a device with a pool of `pool_slots`.

    layer: time between two events, by rows; model: whose that is. hidden: rows -> [rows, d_model].
    seconds: about how long it takes, by the device's clock, but every size is visited at least
    once. progress: told the share that is done.

    Raises CrispError as `check_seconds` does, and what the device fails with.
    """
    check_seconds(seconds)
    if device.describe().get("loads_from") == "mapped":
        raise CrispError("device unified, mapped: loads nothing that could be measured")
    bench = _Bench(device, store, hidden)
    begun = device.clock()
    end = begun + int(seconds * 1e9)
    keys = bench.keys(int(seconds * 1e9))
    samples: dict[Key, list[int]] = {key: [] for key in keys}
    draw = random.Random(0)
    first = True
    while first or device.clock() < end:
        for key in draw.sample(keys, len(keys)):
            if not first and device.clock() >= end:
                break
            samples[key].append(bench.visit(key))
            if progress is not None:
                progress(min(1.0, (device.clock() - begun) / (end - begun)))
        first = False
    return tabulated(device, store, samples, layer, model)


def activations(store: Store) -> Callable[[int], Any]:
    """Random ones on the processor: rows -> [rows, d_model] in the store's type."""
    torch = import_extra("torch")
    made = torch.randn(ROWS[-1], store.spec.d_model, generator=torch.Generator().manual_seed(0))
    made = made.to(getattr(torch, TORCH_TYPES[store.dtype]))
    return lambda rows: made[:rows]


class _Bench:
    """A device whose slots are split between its two streams."""

    def __init__(self, device: Device, store: Store, hidden: Callable[[int], Any]) -> None:
        slots = pool_slots(store)
        self._device, self._spec, self._hidden = device, store.spec, hidden
        self._draw = random.Random(0)
        self._into, self._from = range(slots // 2), range(slots // 2, slots)
        self._fill()

    def _fill(self) -> None:
        """Real weights in all slots that are computed with."""
        size = self._spec.n_blocks
        for start in range(self._from.start, self._from.stop, size):
            slots = self._from[start - self._from.start :][:size]
            TimedChain(self._device, partial(self._copy, slots), handed=False).measure(1, 1, 0)

    def keys(self, budget_ns: int) -> list[Key]:
        """What to measure, so that a first look at all of it fits in the time."""
        for key in (("load", 1, 0, False), ("compute", 1, 1, False)):
            self.look(key)  # the first of all is slower
        n = self._spec.n_blocks
        load_ns = self.look(("load", 1, 0, False))
        sizes = _points(n, 2 * _LEAST * load_ns, budget_ns // _SHARE)
        keys: list[Key] = [("load", size, 0, busy) for size in sizes for busy in (False, True)]
        tried: list[int] = []
        for rows in ROWS:
            longer = 4 * self.look(("compute", n, tried[-1], False)) if tried else 0
            if len(tried) >= _FEWEST and longer > budget_ns // _LONG:
                break
            tried.append(rows)
        piece_ns = sum(self.look(("compute", 1, rows, False)) for rows in tried)
        pieces = _points(n, _LEAST * piece_ns, budget_ns // _SHARE)
        keys += [("compute", size, rows, False) for size in pieces for rows in tried]
        # beside loads only single rows, as in decoding: what waits for memory is what is slowed
        return keys + [("compute", size, 1, True) for size in pieces]

    def look(self, key: Key) -> int:
        """The time of one operation, in ns."""
        return self.visit(key, 1, 1)

    def visit(self, key: Key, least: int = _LEAST, most: int = _MOST) -> int:
        """The mean time of some operations, in ns: where the next block is read along
        with one, the two take very unlike times, and no single one says how long many take.
        """
        stream, blocks, rows, busy = key
        if stream == "load":
            chain, other = self._loads(blocks), self._pieces(self._spec.n_blocks, 1, handed=False)
        else:
            chain, other = self._pieces(blocks, rows), self._loads(self._spec.n_blocks)
        with other.running() if busy else nullcontext():
            return round(fmean(chain.measure(least, most, _VISIT_NS)))

    def _loads(self, blocks: int) -> TimedChain:
        runs = self._one_by_one()

        def make() -> Operation:
            return self._copy(self._draw.sample(self._into, blocks)) if blocks > 1 else next(runs)

        return TimedChain(self._device, make, handed=False)

    def _one_by_one(self) -> Iterator[Operation]:
        """Whole experts by single blocks, each known to follow: as with granularity block."""
        while True:
            row, expert = self._drawn()
            slots = self._draw.sample(self._into, self._spec.n_blocks)
            for block, (slot, then) in enumerate(pairwise([*slots, -1])):
                yield partial(self._device.copy, Copy(row, expert, block, [slot], then))

    def _copy(self, slots: Sequence[int]) -> Operation:
        return partial(self._device.copy, Copy(*self._drawn(), 0, slots))

    def _drawn(self) -> tuple[int, int]:
        """A layer's row and an expert: drawn, so that no cache of the disk's has it."""
        rows, experts = len(self._spec.moe_layers), self._spec.n_experts
        return self._draw.randrange(rows), self._draw.randrange(experts)

    def _pieces(self, blocks: int, rows: int, handed: bool = True) -> TimedChain:
        hidden = self._device.place(self._hidden(rows))
        every, widths = np.arange(rows), np.full(rows, blocks)
        weights = np.full(rows, 0.5, np.float32)

        def make() -> Operation:
            work = ExpertBatch(0, every, widths, weights, hidden)
            piece = BlockRange(work, 0, self._draw.sample(self._from, blocks))
            return lambda done: self._device.compute(piece, done)

        return TimedChain(self._device, make, handed)


def _points(n: int, one_ns: int, budget_ns: int) -> list[int]:
    """Blocks to measure: 1 to n, if all of them fit in the time, else doubling up to n."""
    if one_ns * n * (n + 1) // 2 <= budget_ns:
        return list(range(1, n + 1))
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]
