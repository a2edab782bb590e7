"""The cpu device's arithmetic: blocks of an expert, for the rows that asked for them.

A block adds sigma(x Wg^T) * (x Wu^T) Wd to a row's sum. Sums are in float32 and blocks are added in
their order, so the result is the same to the bit whether blocks are computed one at a time or all
at once, and whichever slots they are in.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pickle import UnpicklingError
from typing import Any

import numpy as np

from crisp.extras import import_extra
from crisp.hw.devices.batch import ExpertBatch
from crisp.hw.devices.cpu.activations import KINDS
from crisp.hw.devices.cpu.chunks import scratch_size
from crisp.hw.devices.cpu.kernels import JOB, POOL_TYPES, end, prepare, run, weigh
from crisp.hw.devices.cpu.weights import column_order
from crisp.hw.devices.protocol import BlockRange
from crisp.hw.errors import DeviceError
from crisp.hw.store.reader import Store
from crisp.model.activation import Activation
from crisp.model.quantization import BITS

_SUMS = 1 << 20  # float32 numbers: 4 MiB for sums of chunks, which threads compute apart
_LEAST, _CHUNKS = 48, 16  # neurons of a chunk; chunks of a block
_ROWS = 256  # computed at a time: of a longer prompt inputs and outputs would leave the cache


class Arithmetic:
    """Computes with the blocks in the slots of a pool."""

    def __init__(self, store: Store, pool: Any, threads: int) -> None:
        """pool: uint8 array [slots, stride]. threads: how many compute, the caller's included."""
        self._torch = import_extra("torch")
        self._spec, self._threads = store.spec, threads
        activation, spec = Activation.read(store.activation), store.spec
        self._constants = np.array([activation.first, activation.second], np.float32)
        self._pool = pool.view(POOL_TYPES[store.dtype])
        self._rest = pool.view(np.int16) if store.dtype in BITS else self._pool
        matrix = spec.block * spec.d_model  # in numbers of the pool
        matrix = matrix // 2 if store.dtype == "int4" else matrix
        behind = spec.matrices * matrix * self._pool.itemsize // self._rest.itemsize
        chunk = min(spec.block, max(_LEAST, -(-spec.block // (16 * _CHUNKS)) * 16))
        self._shape = np.array(
            [spec.d_model, spec.block, spec.matrices - 1, matrix, behind, spec.biases,
             KINDS[activation.kind], chunk]
        )  # fmt: skip
        self._order = column_order(spec.d_model) if store.dtype == "int4" else None
        self._neurons = np.array([spec.neurons(b, b + 1) for b in range(spec.n_blocks)])
        self._table = np.zeros((3, spec.n_blocks), np.int64)  # slots, rows and neurons of blocks
        self._sums = aligned(_SUMS if threads > 1 else 0)
        self._job = np.zeros(JOB, np.int64)
        size = scratch_size(spec.d_model, chunk)
        self._scratch = [aligned(size) for _ in range(threads)]
        self._helpers: list[threading.Thread] = []

    def prepare(self) -> None:
        """Compile the kernels and start all threads, by computing with slot 0.

        Raises DeviceError if the compiled code cannot be kept on disk, or is damaged there.
        """
        row = np.zeros((1, self._spec.d_model), np.float32)
        try:
            self._run(row, [0], [1], np.array([1]), np.zeros_like(row))
            prepare(self._job)
            for scratch in self._scratch[1:]:
                arguments = row, *self._arguments(), self._table, 0, row, self._sums, scratch
                helper = threading.Thread(
                    target=run, args=(*arguments, self._job, -1), name="crisp-helper", daemon=True
                )
                helper.start()
                self._helpers.append(helper)
        except (OSError, EOFError, UnpicklingError) as error:
            folder = run.stats.cache_path
            raise DeviceError(
                f"{folder}: {error}; room for compiled code (kernels.*) was expected here, and "
                "nothing damaged; it may be deleted, or NUMBA_CACHE_DIR name another folder"
            ) from error

    def close(self) -> None:
        """End the helper threads, and let go of the pool."""
        if self._helpers:
            end(self._job, len(self._helpers))
            for helper in self._helpers:
                helper.join()
            self._helpers = []
        self._pool = self._rest = None  # a view, however small, would keep all of its memory
        self._sums, self._scratch = aligned(0), []

    def inputs(self, hidden: Any) -> Any:
        """Return a caller's rows as float32 [n, d_model], for int4 with its columns reordered."""
        rows = hidden.detach().float().numpy()
        return rows if self._order is None else rows.take(self._order, 1)

    def add(self, blocks: BlockRange) -> None:
        """Compute blocks for the rows that use them, and add to ``blocks.batch.sums``."""
        batch, first, last = blocks.batch, blocks.first, blocks.first + len(blocks.slots)
        if batch.inputs is None:
            shape = len(batch.rows), self._spec.d_model
            batch.inputs, batch.sums = (aligned(shape[0] * shape[1]).reshape(shape) for _ in "is")
            batch.hidden.take(batch.rows, 0, out=batch.inputs)
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
        if self._order is not None:
            out[:, self._order] = out.copy()
        return self._torch.from_numpy(out)

    def _run(
        self, x: Any, slots: Sequence[int], counts: Sequence[int], neurons: Any, out: Any
    ) -> None:
        """Add blocks to ``out`` [r, d_model].

        x: float32 [r, d_model]. slots, counts, neurons: by block, its slot, how many leading rows
        use it, and its neurons.
        """
        n = len(slots)
        self._table[0, :n], self._table[1, :n], self._table[2, :n] = slots, counts, neurons
        run(
            x, *self._arguments(), self._table, n, out, self._sums, self._scratch[0], self._job,
            len(self._helpers),
        )  # fmt: skip

    def _arguments(self) -> tuple[Any, ...]:
        return self._pool, self._rest, self._shape, self._constants


def aligned(numbers: int) -> Any:
    """Return zeros in float32, beginning where a cache line does.

    Vectors of 64 bytes that lie across two lines take twice as long to read.
    """
    memory = np.zeros(4 * numbers + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + 4 * numbers].view(np.float32)
