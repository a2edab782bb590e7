"""Calibrate: measure a device's times for the blocks of one store, as a hardware profile.

Each stream is timed alone and while the other is kept busy, in rounds that take every size once, in
random order, so that a drift of the machine affects all sizes alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.hardware.measured import TimeCurve
from crisp.hw.calibration.host_time import measure_host_times
from crisp.hw.calibration.layer_time import measure_layer_times
from crisp.hw.calibration.stopwatch import Operation, TimedChain
from crisp.hw.calibration.tables import DeviceTimes, Key, tabulate
from crisp.hw.devices.batch import ExpertBatch
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.devices.protocol import BlockRange, Copy, Device
from crisp.hw.model.resident import ResidentModel
from crisp.hw.store.block_io import BUFFERED, IN_FLIGHT, UNCACHED
from crisp.hw.store.reader import TORCH_TYPES, Store

ROWS = (1, 2, 4, 16, 64, 256)
_LEAST, _MOST, _VISIT_NS = 3, 16, 50_000_000  # operations of one visit to a size, and their time
_POOL_BYTES = 256_000_000  # so many that the processor's caches do not hold the weights
_MOST_SECONDS = 3600
_SHARE = 6  # the first visit to all sizes of a table may take 1 / _SHARE of the time
_LONG = 30  # one computation may take 1 / _LONG of the time, once there are
_FEWEST = 3  # or more numbers of rows
_CACHED_SHARE = 1 / 8  # of the time, for loads that the page cache holds


def pool_slots(store: Store) -> int:
    """Return the slots of a device that is to be calibrated: an expert or more for each stream."""
    return 2 * max(store.spec.n_blocks, _POOL_BYTES // 2 // store.spec.block_bytes)


def check_seconds(seconds: float) -> None:
    """Raise CrispError for a duration that is not positive, or too long."""
    if not 0 < seconds <= _MOST_SECONDS:
        raise CrispError(f"seconds {seconds:g}: must be above 0 and at most {_MOST_SECONDS}")


def least_seconds(store: Store, link_limit: int) -> float:
    """Return the time of all loads at ``link_limit`` bytes a second, if every size is visited once.

    Raises CrispError if that exceeds the longest calibration allowed.
    """
    blocks = pool_slots(store) // 2 + 2 * _LEAST * sum(_points(store.spec.n_blocks, 1, 0))
    seconds = blocks * store.spec.block_bytes / link_limit
    if seconds > _MOST_SECONDS:
        raise CrispError(f"link limit {link_limit}: it would take {seconds:,.0f} seconds at least, "
                         f"{_MOST_SECONDS} were expected at most")  # fmt: skip
    return seconds


def calibrate_device(
    store: Store,
    options: DeviceOptions,
    seconds: float = 60,
    progress: Callable[[float], None] | None = None,
    model: ResidentModel | None = None,
) -> DeviceTimes:
    """Open a device for a store and measure it, see `calibrate`.

    model: the layers' time is measured on its attention, routers and all else; None: on a replay,
    which has none of these. Where the page cache is to keep what is read, loads are timed once with
    all of it there, and once with nothing.
    """
    if model is None:
        layer = measure_host_times(store, options)
    else:
        layer = measure_layer_times(model, options)
    cached: dict[Key, list[int]] = {}
    hidden = random_activations(store)
    if options.read == BUFFERED:
        with closing(options.open(store, pool_slots(store))) as device:
            cached = time_cached_loads(device, store, hidden, _CACHED_SHARE * seconds)
        options, seconds = replace(options, read=UNCACHED), (1 - _CACHED_SHARE) * seconds
    with closing(options.open(store, pool_slots(store))) as device:
        return calibrate(
            device, store, layer, hidden, seconds=seconds, progress=progress,
            model=None if model is None else model.loaded.name, cached=cached,
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
    cached: Mapping[Key, list[int]] | None = None,
) -> DeviceTimes:
    """Measure a device with a pool of `pool_slots`.

    layer: the time between two events, by rows. hidden: rows -> [rows, d_model].
    seconds: about how long it takes, by the device's clock; every size is visited at least once.
    progress: called with the share that is done. model: the name of the model that ``layer`` is of.
    cached: what `time_cached_loads` has returned, if it was asked.

    Raises CrispError as `check_seconds` does, and what the device fails with.
    """
    check_seconds(seconds)
    if device.describe().get("loads_from") == "mapped":
        raise CrispError("device unified, mapped: loads nothing that could be measured")
    bench = _Bench(device, store, hidden)
    start = device.clock()
    end = start + int(seconds * 1e9)
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
                progress(min(1.0, (device.clock() - start) / (end - start)))
        first = False
    return tabulate(device, store, samples | dict(cached or {}), layer, model)


def time_cached_loads(
    device: Device, store: Store, hidden: Callable[[int], Any], seconds: float
) -> dict[Key, list[int]]:
    """Time loads of what the system's page cache holds, on a device that reads through it.

    Some experts are read once, and then again and again. Returns ns by size, as `calibrate` has
    them. Raises what the device fails with.
    """
    few = max(1, min(store.spec.n_routed, _POOL_BYTES // store.spec.expert_bytes))
    bench, draw = _Bench(device, store, hidden, few), random.Random(0)
    bench.read_once()
    keys: list[Key] = [
        ("page_cache", size, 0, False) for size in _points(store.spec.n_blocks, 1, 0)
    ]
    samples: dict[Key, list[int]] = {key: [] for key in keys}
    end = device.clock() + int(seconds * 1e9)
    while not samples[keys[0]] or device.clock() < end:
        for key in draw.sample(keys, len(keys)):
            samples[key].append(bench.visit(key))
    return samples


def random_activations(store: Store) -> Callable[[int], Any]:
    """Return a function that gives random activations: rows -> [rows, d_model], on the host."""
    torch = import_extra("torch")
    seeded = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS[-1], store.spec.d_model, generator=seeded)  # [256, d_model]
    hidden = hidden.to(getattr(torch, TORCH_TYPES[store.dtype]))
    return lambda rows: hidden[:rows]


class _Bench:
    """Operations to be timed, on a device whose slots are split between its two streams."""

    def __init__(
        self, device: Device, store: Store, hidden: Callable[[int], Any], most: int | None = None
    ) -> None:
        """most: of the store's experts that are loaded, the first ones; None: all."""
        slots = pool_slots(store)
        self._loaded = store.spec.n_routed if most is None else most
        self._device, self._spec, self._hidden = device, store.spec, hidden
        self._draw = random.Random(0)
        self._into, self._from = range(slots // 2), range(slots // 2, slots)
        self._fill()

    def _fill(self) -> None:
        """Load real weights into all slots that are computed with."""
        size = self._spec.n_blocks
        for start in range(self._from.start, self._from.stop, size):
            slots = self._from[start - self._from.start :][:size]
            TimedChain(self._device, partial(self._copy, slots), handed=False).measure(1, 1, 0)

    def read_once(self) -> None:
        """Load each of the experts, as a whole."""
        slots = self._into[: self._spec.n_blocks]
        for entry in range(self._loaded):
            copy = Copy(*divmod(entry, self._spec.n_experts), 0, slots)
            make = partial(partial, self._device.copy, copy)
            TimedChain(self._device, make, handed=False).measure(1, 1, 0)

    def keys(self, budget_ns: int) -> list[Key]:
        """Choose the sizes to measure, so that a first visit to all of them fits in the time."""
        for key in (("load", 1, 0, False), ("compute", 1, 1, False)):
            self.measure_once(key)  # the very first operation is slower
        n = self._spec.n_blocks
        load_ns = self.measure_once(("load", 1, 0, False))
        sizes = _points(n, 2 * _LEAST * load_ns, budget_ns // _SHARE)
        keys: list[Key] = [("load", size, 0, busy) for size in sizes for busy in (False, True)]
        row_counts: list[int] = []
        for rows in ROWS:
            last = row_counts[-1] if row_counts else None
            longer = 0 if last is None else 4 * self.measure_once(("compute", n, last, False))
            if len(row_counts) >= _FEWEST and longer > budget_ns // _LONG:
                break
            row_counts.append(rows)
        block_ns = sum(self.measure_once(("compute", 1, rows, False)) for rows in row_counts)
        sizes = _points(n, _LEAST * block_ns, budget_ns // _SHARE)
        keys += [("compute", size, rows, False) for size in sizes for rows in row_counts]
        # beside loads only single rows, as in decoding: waiting for memory is what is slowed down
        return keys + [("compute", size, 1, True) for size in sizes]

    def measure_once(self, key: Key) -> int:
        """Return the time of one operation, in ns."""
        return self.visit(key, 1, 1)

    def visit(self, key: Key, least: int = _LEAST, most: int = _MOST) -> int:
        """Return the mean time of some operations, in ns.

        A mean, because single ones differ much where the next block is read along with one.
        """
        stream, blocks, rows, busy = key
        if stream != "compute":
            chain = self._loads(blocks)
            other = self._computations(self._spec.n_blocks, 1, handed=False)
        else:
            chain, other = self._computations(blocks, rows), self._loads(self._spec.n_blocks)
        with other.running() if busy else nullcontext():
            return round(fmean(chain.measure(least, most, _VISIT_NS)))

    def _loads(self, blocks: int) -> TimedChain:
        """Return a chain of loads of random experts' blocks, begun by the link's callback."""
        runs = self._one_by_one()

        def make() -> Operation:
            return self._copy(self._draw.sample(self._into, blocks)) if blocks > 1 else next(runs)

        return TimedChain(self._device, make, handed=False)

    def _one_by_one(self) -> Iterator[Operation]:
        """Yield loads of whole experts by single blocks, each announced: as with granularity
        block.
        """
        while True:
            row, expert = self._draw_expert()
            slots = self._draw.sample(self._into, self._spec.n_blocks)
            for block, slot in enumerate(slots):
                then = slots[block + 1 :][: IN_FLIGHT - 1]
                yield partial(self._device.copy, Copy(row, expert, block, [slot], then))

    def _copy(self, slots: Sequence[int]) -> Operation:
        """Return a load of a random expert's leading blocks."""
        return partial(self._device.copy, Copy(*self._draw_expert(), 0, slots))

    def _draw_expert(self) -> tuple[int, int]:
        """Draw a layer's row and an expert: of all, so that no cache of the disk holds it."""
        return divmod(self._draw.randrange(self._loaded), self._spec.n_experts)

    def _computations(self, blocks: int, rows: int, handed: bool = True) -> TimedChain:
        """Return a chain of computations of some blocks for some rows."""
        hidden = self._device.place(self._hidden(rows))
        every, widths = np.arange(rows), np.full(rows, blocks)
        weights = np.full(rows, 0.5, np.float32)

        def make() -> Operation:
            batch = ExpertBatch(0, every, widths, weights, hidden)
            one = BlockRange(batch, 0, self._draw.sample(self._from, blocks))
            return lambda done: self._device.compute(one, done)

        return TimedChain(self._device, make, handed)


def _points(n: int, one_ns: int, budget_ns: int) -> list[int]:
    """Return the numbers of blocks to measure: 1 to n, if the time suffices, else doubling to n."""
    if one_ns * n * (n + 1) // 2 <= budget_ns:
        return list(range(1, n + 1))
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]
