"""CUDA's streams, through torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.hw.errors import DeviceError

_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped


@contextmanager
def cuda_errors() -> Iterator[None]:
    """Turn CUDA's errors within the block into a DeviceError of one line."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError and torch.AcceleratorError are some
        line = str(error).strip().splitlines()
        raise DeviceError(f"cuda: {line[0] if line else type(error).__name__}") from error


class _Event:
    def __init__(self, event: Any) -> None:
        self.event = event

    def synchronize(self) -> None:
        with cuda_errors():
            self.event.synchronize()


class TorchCuda:
    """CUDA's implementation of `crisp.hw.devices.gpu.streams.DeviceStreams`."""

    def __init__(self) -> None:
        """Raises CrispError where torch finds no GPU."""
        self._torch = import_extra("torch")
        if not self._torch.cuda.is_available():
            built = self._torch.version.cuda
            why = "torch was built without CUDA" if built is None else "torch finds no NVIDIA GPU"
            raise CrispError(f"--device: {why} (torch {self._torch.__version__})")
        self._cuda = self._torch.cuda
        with cuda_errors():
            self._device = self._torch.device("cuda", self._cuda.current_device())
            self._properties = self._cuda.get_device_properties(self._device)

    @property
    def name(self) -> str:
        """The GPU's name."""
        return str(self._properties.name)

    def stream(self) -> Any:
        """Return a new stream of high priority, because the whole model waits for experts."""
        return self._cuda.Stream(self._device, priority=-1)

    def current(self) -> Any:
        """Return this thread's current stream."""
        return self._cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Make ``stream`` current in this thread within the block."""
        context: AbstractContextManager[None] = self._cuda.stream(stream)
        return context

    def launch(self, operation: Callable[..., None], *args: Any) -> None:
        """Call ``operation``: torch and Triton launch on the current stream by themselves."""
        with cuda_errors():
            operation(*args)

    def record(self) -> _Event:
        """Record an event without timing, which costs less. Waiting for it sleeps, because the
        processor is needed elsewhere.
        """
        with cuda_errors():
            event = self._cuda.Event(blocking=True)
            event.record(self.current())
            return _Event(event)

    def wait(self, event: Any) -> None:
        """Make the current stream wait for the event (cudaStreamWaitEvent)."""
        with cuda_errors():
            self.current().wait_event(event.event)

    def empty(self, *shape: int, dtype: str) -> Any:
        """Allocate by torch's caching allocator, whose memory belongs to the current stream."""
        with cuda_errors():
            return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=self._device)

    def upload(self, numbers: Any) -> Any:
        """Copy through pinned memory, which torch keeps until the copy has ended."""
        host = numbers if self._torch.is_tensor(numbers) else self._torch.from_numpy(numbers)
        with cuda_errors():
            return host if host.is_cuda else host.pin_memory().to(self._device, non_blocking=True)

    def download(self, tensor: Any) -> tuple[Any, _Event]:
        """Copy into pinned memory, which torch keeps and reuses without calling the driver."""
        with cuda_errors():
            host = self._torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        return host, self.record()

    def register(self, memory: Any) -> str | None:
        """Page-lock and map host memory (cudaHostRegister); return the error's text if it fails."""
        runtime = self._cuda.cudart()
        code = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _MAPPED)
        if int(code) == 0:
            return None
        with contextlib.suppress(
            RuntimeError
        ):  # clears the error, which the next kernel would raise
            self._torch.empty(1, device=self._device).zero_()
        return str(runtime.cudaGetErrorString(code))

    def unregister(self, memory: Any) -> None:
        """Undo `register` (cudaHostUnregister); errors at the end of a process are ignored."""
        self._cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def free_bytes(self) -> int:
        """Return the free device memory in bytes, as the driver says."""
        with cuda_errors():
            free, _ = self._cuda.mem_get_info(self._device)
            return int(free)
