"""A read that begins in one thread and ends in another: Linux's io_submit, one read at a time.

So a disk is at work from the moment at which somebody decides what it reads, and what else there is
to do then is done meanwhile. The C library has no functions for it, only `syscall`.
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
_PREADV = 7  # of <linux/aio_abi.h>, like the structures
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
    """At most one read on its way; `close` when done."""

    def __init__(self) -> None:
        """Raises OSError where the system has no such reads, or lets nobody have more of them."""
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
    def opened(cls, n: int, file: int) -> list[AsynchronousRead]:
        """So many, each of which has read a page of ``file`` (open with O_DIRECT); none where the
        system has no such reads, refuses them, or lets nobody have so many more.
        """
        made: list[AsynchronousRead] = []
        try:
            while len(made) < n:
                made.append(cls())
                made[-1]._try(file)
        except OSError:
            while made:
                made.pop().close()
        return made

    def begin(self, file: int, places: Sequence[memoryview], offset: int) -> bool:
        """Begin to read from ``offset`` on into at most MOST_PLACES, which the caller keeps until
        `end`; whether it has begun.
        """
        for i, place in enumerate(places):
            self._vector[2 * i] = ctypes.addressof(ctypes.c_char.from_buffer(place))
            self._vector[2 * i + 1] = len(place)
        request = self._request
        request.file, request.n, request.offset = file, len(places), offset
        return bool(_SYSTEM(self._submit, self._context, _ONE, self._requests) == 1)

    def end(self) -> int:
        """Wait for it: the bytes that were read. Raises OSError as preadv does."""
        self._call(self._getevents, self._context, _ONE, _ONE, ctypes.byref(self._ended), None)
        found = int(self._ended.result)
        if found < 0:
            raise OSError(-found, os.strerror(-found))
        return found

    def close(self) -> None:
        """When nothing is on its way; more than once is fine."""
        if self._context.value:
            self._call(self._destroy, self._context)
            self._context = ctypes.c_ulong(0)

    def _try(self, file: int) -> None:
        """Raise OSError unless reads begin and end."""
        with mmap.mmap(-1, mmap.PAGESIZE) as memory, memoryview(memory) as page:
            if not self.begin(file, [page], 0):
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            self.end()

    def _call(self, *args: object) -> None:
        while _SYSTEM(*args) < 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
