"""What the cpu device computes: blocks of an expert, for the rows that asked for them.

A block adds sigma(x Wg^T) * (x Wu^T) Wd to a row's sum, and sums are kept in float32, block by
block in their order. So the result is the same to the bit whether blocks are computed one at a time
or all at once, and wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pickle import UnpicklingError
from typing import Any

import numpy as np

from crisp.extras import need
from crisp.hw.devices.batch import Work
from crisp.hw.devices.cpu.groups import SIXTEEN
from crisp.hw.devices.cpu.kernels import GELU, GPT_OSS, POOL_TYPES, SILU, back, front, run, weigh
from crisp.hw.devices.protocol import Piece
from crisp.hw.errors import DeviceError
from crisp.hw.store.reader import Store
from crisp.model.quantization import BITS

_ROOM = 1 << 18  # numbers between the projections: 1 MiB, which a core's cache holds
_KINDS = {"silu": SILU, "gelu": GELU, "gpt_oss": GPT_OSS}


class Arithmetic:
    """Computes on the slots of a pool."""

    def __init__(self, store: Store, pool: Any, threads: int) -> None:
        """pool: uint8 array [slots, stride]. threads: the caller's and others'."""
        self._torch = need("torch")
        self._spec, self._threads = store.spec, threads
        self._kind = _KINDS[store.activation]
        self._pool = pool.view(POOL_TYPES[store.dtype])
        self._rest = pool.view(np.int16) if store.dtype in BITS else self._pool
        matrix = store.spec.block * store.spec.d_model  # in numbers of the pool
        matrix = matrix // 2 if store.dtype == "int4" else matrix
        behind = 3 * matrix * self._pool.itemsize // self._rest.itemsize  # in numbers of the rest
        self._places = store.spec.block, matrix, behind
        self._order = _even_first(store.spec.d_model) if store.dtype == "int4" else None
        self._neurons = np.array(
            [store.spec.neurons(block, block + 1) for block in range(store.spec.n_blocks)]
        )
        self._hidden = np.empty(_ROOM, np.float32)
        self._helpers = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def prepare(self) -> None:
        """Compile, and start threads: with slot 0, whatever is in it.

        Raises DeviceError if what was compiled cannot be kept, or is damaged.
        """
        row = np.zeros((1, self._spec.d_model), np.float32)
        try:
            self._run(row, [0], [1], np.array([1]), np.zeros_like(row))
        except (OSError, EOFError, UnpicklingError) as error:
            folder = run.stats.cache_path
            raise DeviceError(
                f"{folder}: {error}; room for compiled code (cpu_kernels.*) was expected here, and "
                "nothing damaged; it may be deleted, or NUMBA_CACHE_DIR name another folder"
            ) from error

    def close(self) -> None:
        """End all threads of its own, and let go of the pool."""
        if self._helpers is not None:
            self._helpers.shutdown()
        self._pool = self._rest = None  # a part of it, however small, would keep all

    def inputs(self, hidden: Any) -> Any:
        """A caller's rows [n, d_model] as they are computed with: float32, for int4 reordered."""
        rows = hidden.detach().float().numpy()
        return rows if self._order is None else rows.take(self._order, 1)

    def add(self, piece: Piece) -> None:
        """Add the piece's blocks to its work's sums."""
        work, first, last = piece.work, piece.first, piece.first + len(piece.slots)
        if work.inputs is None:
            work.inputs = work.hidden[work.rows]
            work.sums = np.zeros_like(work.inputs)
        neurons = self._neurons[first:last]
        self._run(work.inputs, piece.slots, work.counts[first:last], neurons, work.sums)

    def combine(self, works: Sequence[Work], rows: int) -> Any:
        """Sums times weights, summed over experts by ascending id: [rows, d_model] float32."""
        out = np.zeros((rows, self._spec.d_model), np.float32)
        for work in sorted(works, key=lambda work: work.expert):
            weigh(work.sums, work.weights, work.rows, out)
        return self._torch.from_numpy(out)

    def _run(
        self, x: Any, slots: Sequence[int], counts: Sequence[int], neurons: Any, out: Any
    ) -> None:
        spec, each = self._spec, 2 * self._spec.block * len(x)
        if self._hidden.size < each:
            self._hidden = np.empty(each, np.float32)
        some = min(len(slots), self._hidden.size // each)  # blocks whose hidden rows have room
        hidden = self._hidden[: some * each].reshape(some, len(x), 2, spec.block)
        for low in range(0, len(slots), some):
            part = slice(low, low + some)
            blocks = np.array(slots[part]), np.array(counts[part]), neurons[part]
            how = self._pool, self._rest, *blocks, *self._places
            if self._helpers is None:
                run(x, *how, self._kind, spec.biases, hidden, out)
            else:
                self._share(front, x, *how, self._kind, spec.biases, hidden)
                self._share(back, *how, spec.biases, hidden, out)

    def _share(self, kernel: Callable[..., None], *args: Any) -> None:
        """Run a kernel in parts, one for each thread; all have ended when it returns."""
        assert self._helpers is not None
        threads = self._threads
        others = [self._helpers.submit(kernel, *args, n, threads) for n in range(1, threads)]
        kernel(*args, 0, threads)
        for other in others:
            other.result()


def _even_first(columns: int) -> Any:
    """The order in which int4's columns are computed, int64 [columns]."""
    return (np.arange(0, columns, 16)[:, None] + SIXTEEN).reshape(-1)
