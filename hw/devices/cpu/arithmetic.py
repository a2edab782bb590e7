"""The cpu device's arithmetic: blocks of an expert, for the rows that asked for them.

A block adds sigma(x Wg^T) * (x Wu^T) Wd to a row's sum. Sums are in float32 and blocks are added in
their order, so the result is the same to the bit whether blocks are computed one at a time or all
at once, and whichever slots they are in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pickle import UnpicklingError
from typing import Any

import numpy as np

from crisp.extras import import_extra
from crisp.hw.devices.batch import ExpertBatch
from crisp.hw.devices.cpu.activations import KINDS
from crisp.hw.devices.cpu.groups import SIXTEEN
from crisp.hw.devices.cpu.kernels import POOL_TYPES, back, front, run, weigh
from crisp.hw.devices.protocol import BlockRange
from crisp.hw.errors import DeviceError
from crisp.hw.store.reader import Store
from crisp.model.activation import Activation
from crisp.model.quantization import BITS

_BUFFER = 1 << 18  # numbers between the projections: 1 MiB, which a core's cache holds
_ROWS = 256  # computed at a time: of a longer prompt inputs and outputs would leave the cache


class Arithmetic:
    """Computes with the blocks in the slots of a pool."""

    def __init__(self, store: Store, pool: Any, threads: int) -> None:
        """pool: uint8 array [slots, stride]. threads: how many compute, the caller's included."""
        self._torch = import_extra("torch")
        self._spec, self._threads = store.spec, threads
        activation = Activation.read(store.activation)
        constants = np.array([activation.first, activation.second], np.float32)
        self._activation = KINDS[activation.kind], constants
        self._projections = store.spec.matrices - 1
        self._pool = pool.view(POOL_TYPES[store.dtype])
        self._rest = pool.view(np.int16) if store.dtype in BITS else self._pool
        matrix = store.spec.block * store.spec.d_model  # in numbers of the pool
        matrix = matrix // 2 if store.dtype == "int4" else matrix
        size = store.spec.matrices * matrix * self._pool.itemsize
        behind = size // self._rest.itemsize  # in numbers of rest
        self._places = store.spec.block, matrix, behind, store.spec.biases
        self._order = _even_first(store.spec.d_model) if store.dtype == "int4" else None
        self._neurons = np.array(
            [store.spec.neurons(block, block + 1) for block in range(store.spec.n_blocks)]
        )
        self._hidden = np.empty(_BUFFER, np.float32)
        self._helpers = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def prepare(self) -> None:
        """Compile the kernels and start all threads, by computing with slot 0.

        Raises DeviceError if the compiled code cannot be kept on disk, or is damaged there.
        """
        row = np.zeros((1, self._spec.d_model), np.float32)
        try:
            self._run(row, [0], [1], np.array([1]), np.zeros_like(row))
        except (OSError, EOFError, UnpicklingError) as error:
            folder = run.stats.cache_path
            raise DeviceError(
                f"{folder}: {error}; room for compiled code (kernels.*) was expected here, and "
                "nothing damaged; it may be deleted, or NUMBA_CACHE_DIR name another folder"
            ) from error

    def close(self) -> None:
        """End the helper threads, and let go of the pool."""
        if self._helpers is not None:
            self._helpers.shutdown()
        self._pool = self._rest = None  # a view, however small, would keep all of its memory

    def inputs(self, hidden: Any) -> Any:
        """Return a caller's rows as float32 [n, d_model], for int4 with its columns reordered."""
        rows = hidden.detach().float().numpy()
        return rows if self._order is None else rows.take(self._order, 1)

    def add(self, blocks: BlockRange) -> None:
        """Compute blocks for the rows that use them, and add to ``blocks.batch.sums``."""
        batch, first, last = blocks.batch, blocks.first, blocks.first + len(blocks.slots)
        if batch.inputs is None:
            batch.inputs = batch.hidden[batch.rows]  # [r, d_model]
            batch.sums = np.zeros_like(batch.inputs)  # [r, d_model]
        neurons, counts = self._neurons[first:last], batch.counts[first:last]
        for low in range(0, len(batch.inputs), _ROWS):
            rows = slice(low, low + _ROWS)
            some = [min(max(0, count - low), _ROWS) for count in counts]
            self._run(batch.inputs[rows], blocks.slots, some, neurons, batch.sums[rows])

    def combine(self, batches: Sequence[ExpertBatch], rows: int) -> Any:
        """Return the sums times the router's weights, added by ascending expert id: float32
        [rows, d_model].
        """
        out = np.zeros((rows, self._spec.d_model), np.float32)
        for batch in sorted(batches, key=lambda batch: batch.expert):
            weigh(batch.sums, batch.weights, batch.rows, out)
        return self._torch.from_numpy(out)

    def _run(
        self, x: Any, slots: Sequence[int], counts: Sequence[int], neurons: Any, out: Any
    ) -> None:
        """Add blocks to ``out`` [r, d_model], as many at a time as the buffer between the
        projections holds.

        x: float32 [r, d_model]. slots, counts, neurons: by block, its slot, how many leading rows
        use it, and its neurons.
        """
        spec, projections = self._spec, self._projections
        each = projections * spec.block * len(x)
        if self._hidden.size < each:
            self._hidden = np.empty(each, np.float32)
        at_once = min(len(slots), self._hidden.size // each)  # blocks
        hidden = self._hidden[: at_once * each].reshape(at_once, len(x), projections, spec.block)
        for low in range(0, len(slots), at_once):
            part = slice(low, low + at_once)
            blocks = np.array(slots[part]), np.array(counts[part]), neurons[part]
            arguments = self._pool, self._rest, *blocks, *self._places
            if self._helpers is None:
                run(x, *arguments, *self._activation, hidden, out)
            else:
                self._share(front, x, *arguments, *self._activation, hidden)
                self._share(back, *arguments, hidden, out)

    def _share(self, kernel: Callable[..., None], *args: Any) -> None:
        """Run a kernel in parts, one for each thread, and wait for all of them."""
        assert self._helpers is not None
        threads = self._threads
        others = [self._helpers.submit(kernel, *args, n, threads) for n in range(1, threads)]
        kernel(*args, 0, threads)
        for other in others:
            other.result()


def _even_first(columns: int) -> Any:
    """Return the order in which int4's columns are computed: int64 [columns]."""
    return (np.arange(0, columns, 16)[:, None] + SIXTEEN).reshape(-1)
