"""Asynchronous reads: begun in one thread and ended in another, by Linux's io_submit.

So the disk is at work from the moment at which a load is decided on, while the deciding thread goes
on. The C library has no functions for these system calls, only `syscall`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
from collections.abc import Sequence

_CALLS = {  # io_setup, io_destroy, io_getevents, io_submit
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
}
_PREADV = 7  # IOCB_CMD_PREADV of <linux/aio_abi.h>, like the structures
MOST_PLACES = 1024  # of one read, here and in preadv (UIO_MAXIOV)
_ONE = ctypes.c_long(1)
_SYSTEM = ctypes.CDLL(None, use_errno=True).syscall
_SYSTEM.restype = ctypes.c_long


class _Request(ctypes.Structure):
    """struct iocb."""

    _fields_ = (
        ("data", ctypes.c_uint64), ("key", ctypes.c_uint32), ("rw_flags", ctypes.c_uint32),
        ("opcode", ctypes.c_uint16), ("priority", ctypes.c_int16), ("file", ctypes.c_uint32),
        ("vector", ctypes.c_uint64), ("n", ctypes.c_uint64), ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("eventfd", ctypes.c_uint32),
    )  # fmt: skip


class _Ended(ctypes.Structure):
    """struct io_event."""

    _fields_ = (
        ("data", ctypes.c_uint64), ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64), ("second", ctypes.c_int64),
    )  # fmt: skip


class AsynchronousRead:
    """A context of the kernel for one read at a time; `close` when done."""

    def __init__(self) -> None:
        """Raises OSError where the system has no asynchronous reads, or allows no more of them."""
        machine = platform.machine()
        if sys.platform != "linux" or machine not in _CALLS or ctypes.sizeof(ctypes.c_void_p) != 8:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._setup, self._destroy, self._getevents, self._submit = _CALLS[machine]
        self._context = ctypes.c_ulong(0)
        self._call(self._setup, _ONE, ctypes.byref(self._context))
        self._request, self._ended = _Request(opcode=_PREADV), _Ended()
        self._vector = (ctypes.c_uint64 * (2 * MOST_PLACES))()
        self._request.vector = ctypes.addressof(self._vector)
        self._requests = ctypes.pointer(ctypes.pointer(self._request))

    @classmethod
    def open_several(cls, n: int, file: int) -> list[AsynchronousRead]:
        """Return ``n`` contexts, each tried by reading a page of ``file`` (open with O_DIRECT).

        Returns none where the system has no asynchronous reads, refuses them, or allows fewer.
        """
        contexts: list[AsynchronousRead] = []
        try:
            while len(contexts) < n:
                contexts.append(cls())
                contexts[-1]._try(file)
        except OSError:
            while contexts:
                contexts.pop().close()
        return contexts

    def begin(self, file: int, places: Sequence[memoryview], offset: int) -> bool:
        """Submit a read from byte ``offset`` of a file into places (io_submit); return whether the
        system accepted it.

        places: at most MOST_PLACES, which the caller keeps alive until `end`.
        """
        for i, place in enumerate(places):
            self._vector[2 * i] = ctypes.addressof(ctypes.c_char.from_buffer(place))
            self._vector[2 * i + 1] = len(place)
        request = self._request
        request.file, request.n, request.offset = file, len(places), offset
        return bool(_SYSTEM(self._submit, self._context, _ONE, self._requests) == 1)

    def end(self) -> int:
        """Wait for the read (io_getevents) and return its bytes. Raises OSError as preadv does."""
        self._call(self._getevents, self._context, _ONE, _ONE, ctypes.byref(self._ended), None)
        result = int(self._ended.result)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def close(self) -> None:
        """Free the context, when no read is on its way; idempotent."""
        if self._context.value:
            self._call(self._destroy, self._context)
            self._context = ctypes.c_ulong(0)

    def _try(self, file: int) -> None:
        """Raise OSError unless a read of the file's first page begins and ends."""
        with mmap.mmap(-1, mmap.PAGESIZE) as memory, memoryview(memory) as page:
            if not self.begin(file, [page], 0):
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            self.end()

    def _call(self, *args: object) -> None:
        """Make a system call, again after an interrupt; raise OSError if it fails."""
        while _SYSTEM(*args) < 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
