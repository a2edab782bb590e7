"""One function on many items, on all cores of this machine or of a cluster."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import islice
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from crisp.errors import CrispError
from crisp.extensions import with_plugins

T = TypeVar("T")
R = TypeVar("R")
BACKENDS = ("loky", "dask", "ray")  # processes here, or a cluster's workers
# Items that are handed out at a time: no more than loky passes on at once, as stopping it leaves
# traces of what it holds back. So items may go on for ever.
_AHEAD = "2 * n_jobs"
_CONNECT = 10  # seconds
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def side_by_side(
    function: Callable[[T], R],
    items: Iterable[T],
    *,
    jobs: int,
    backend: str = BACKENDS[0],
    scheduler: str | None = None,
) -> Iterator[Iterator[R]]:
    """Yield results as they come, in no order; leaving the block stops what has not finished.

    function and items go to other processes unless there is one job. scheduler: the cluster's
    address, where the backend is one.

    Raises CrispError where a worker was killed or the cluster cannot be reached.
    """
    function = with_plugins(function)
    with ExitStack() as stack:
        try:
            yield _results(function, items, jobs, backend, scheduler, stack)
        except BrokenProcessPool as error:
            raise CrispError("a worker process was killed; was there memory enough?") from error
        except Exception as error:
            if type(error).__name__ in ("KilledWorker", "WorkerCrashedError"):  # of dask, of ray
                raise CrispError("a worker was killed; had it memory enough?") from error
            raise


def _results(
    function: Callable[[T], R],
    items: Iterable[T],
    jobs: int,
    backend: str,
    scheduler: str | None,
    stack: ExitStack,
) -> Iterator[R]:
    if backend == "loky":
        return map(function, items) if jobs < 2 else _here(function, items, jobs, stack)
    connect = {"dask": _dask, "ray": _ray}[backend]
    return connect(function, items, scheduler, stack)


def _here(
    function: Callable[[T], R], items: Iterable[T], jobs: int, stack: ExitStack
) -> Iterator[R]:
    import joblib

    parallel = joblib.Parallel(
        jobs, "loky", return_as="generator_unordered", pre_dispatch=_AHEAD, batch_size=1,
        initializer=_end_with, initargs=(os.getpid(),),
    )  # fmt: skip
    threading.excepthook = _unless_joblibs(threading.excepthook)
    with _interrupts_held():
        finished: Generator[R] = parallel(_calls(function, items))
        stack.callback(_stop, finished)
    return finished


def _end_with(parent: int) -> None:
    """Have the system end this worker when its parent is gone: one that is killed cannot do it."""
    if sys.platform != "linux":
        return
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed before
            signal.raise_signal(signal.SIGTERM)


def _dask(
    function: Callable[[T], R],
    items: Iterable[T],
    scheduler: str | None,
    stack: ExitStack,
) -> Iterator[R]:
    """Use dask's own client: joblib's backend waits for ever for a worker that was killed."""
    distributed = _need("distributed", "dask distributed")
    try:
        client = stack.enter_context(distributed.Client(scheduler, timeout=_CONNECT))
    except (OSError, ValueError) as error:
        raise CrispError(f"--scheduler {scheduler}: no dask scheduler answers there") from error
    rest, finished = iter(items), distributed.as_completed()

    def hand_out() -> None:
        """Hand out two items for each core there is now."""
        missing = 2 * max(1, sum(client.ncores().values())) - finished.count()
        for item in islice(rest, max(0, missing)):
            finished.add(client.submit(function, item, pure=False))

    def results() -> Iterator[R]:
        hand_out()
        for future in finished:
            yield future.result()
            hand_out()

    return results()


def _ray(
    function: Callable[[T], R],
    items: Iterable[T],
    scheduler: str | None,
    stack: ExitStack,
) -> Iterator[R]:
    """Use ray slice by slice: its backend returns lists only."""
    import joblib

    ray = _need("ray", "ray")
    try:
        ray.init(scheduler, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        raise CrispError(f"--scheduler {scheduler}: no ray cluster answers there") from error
    stack.callback(ray.shutdown)
    _need("ray.util.joblib", "ray").register_ray()
    stack.enter_context(joblib.parallel_config("ray"))
    parallel = joblib.Parallel(-1, batch_size=1)
    rest = iter(items)
    each = 4 * int(ray.cluster_resources().get("CPU", 1))

    def slices() -> Iterator[R]:
        while some := list(islice(rest, each)):
            yield from parallel(_calls(function, some))

    return slices()


def _need(module: str, packages: str) -> Any:
    """Import a module of a cluster's backend; CrispError where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        backend = packages.partition(" ")[0]
        raise CrispError(
            f"--backend {backend}: is not installed; pip install {packages}"
        ) from error


def _calls(function: Callable[[T], R], items: Iterable[T]) -> Iterator[Any]:
    import joblib

    return map(joblib.delayed(function), items)


def _unless_joblibs(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """The hook for all threads but joblib's, which trips over tasks that are gone when the work is
    stopped: what has failed is raised where the results are taken.
    """
    return lambda failure: (
        None if type(failure.thread).__name__ == "_ExecutorManagerThread" else hook(failure)
    )


def _stop(finished: Generator[Any]) -> None:
    """End the workers; nothing happens if all are done."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # joblib's advice on work that was in vain
        finished.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Answer Ctrl-C when the block ends; processes that start in it never get any.

    So a terminal's Ctrl-C reaches this process alone, which stops its workers itself.
    """
    caught: list[int] = []
    resource_tracker.ensure_running()  # joblib starts it, and starting it lets signals through
    handler = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if caught and callable(handler):
        handler(signal.SIGINT, None)
