"""CUDA's streams by way of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from crisp.errors import CrispError
from crisp.extras import need
from crisp.hw.errors import DeviceError

_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped


@contextmanager
def told() -> Iterator[None]:
    """What CUDA complains of within the block is a DeviceError, of one line."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError and torch.AcceleratorError are some
        line = str(error).strip().splitlines()
        raise DeviceError(f"cuda: {line[0] if line else type(error).__name__}") from error


class _Event:
    def __init__(self, event: Any) -> None:
        self.event = event

    def synchronize(self) -> None:
        with told():
            self.event.synchronize()


class TorchCuda:
    """See `crisp.hw.devices.gpu.streams.Streams`."""

    def __init__(self) -> None:
        """Raises CrispError where torch finds no GPU."""
        self._torch = need("torch")
        if not self._torch.cuda.is_available():
            built = self._torch.version.cuda
            why = "torch was built without CUDA" if built is None else "torch finds no NVIDIA GPU"
            raise CrispError(f"--device: {why} (torch {self._torch.__version__})")
        self._cuda = self._torch.cuda
        with told():
            self._device = self._torch.device("cuda", self._cuda.current_device())
            self._properties = self._cuda.get_device_properties(self._device)

    @property
    def name(self) -> str:
        """Of the GPU."""
        return str(self._properties.name)

    def stream(self) -> Any:
        """A new one, of high priority: what waits for experts waits for these two."""
        return self._cuda.Stream(self._device, priority=-1)

    def current(self) -> Any:
        """Of this thread."""
        return self._cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Makes it current in this thread."""
        context: AbstractContextManager[None] = self._cuda.stream(stream)
        return context

    def launch(self, operation: Callable[..., None], *args: Any) -> None:
        """Torch's operations and Triton's kernels go to the current stream by themselves."""
        with told():
            operation(*args)

    def record(self) -> _Event:
        """Without timing, which costs less. It sleeps while it waits: the processor is needed."""
        with told():
            event = self._cuda.Event(blocking=True)
            event.record(self.current())
            return _Event(event)

    def wait(self, event: Any) -> None:
        """cudaStreamWaitEvent."""
        with told():
            self.current().wait_event(event.event)

    def empty(self, *shape: int, dtype: str) -> Any:
        """From torch's caching allocator, whose memory belongs to the current stream."""
        with told():
            return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=self._device)

    def upload(self, numbers: Any) -> Any:
        """By way of pinned memory, which torch keeps until the copy has ended."""
        own = numbers if self._torch.is_tensor(numbers) else self._torch.from_numpy(numbers)
        with told():
            return own if own.is_cuda else own.pin_memory().to(self._device, non_blocking=True)

    def download(self, tensor: Any) -> tuple[Any, _Event]:
        """Torch keeps page-locked memory that was used once: no call of the driver is needed."""
        with told():
            found = self._torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            found.copy_(tensor, non_blocking=True)
        return found, self.record()

    def register(self, memory: Any) -> str | None:
        """cudaHostRegister."""
        runtime = self._cuda.cudart()
        code = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _MAPPED)
        if int(code) == 0:
            return None
        with contextlib.suppress(RuntimeError):  # else the next kernel would be blamed for it
            self._torch.empty(1, device=self._device).zero_()
        return str(runtime.cudaGetErrorString(code))

    def unregister(self, memory: Any) -> None:
        """cudaHostUnregister; at the end of a process there may be nobody to tell."""
        self._cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def free_bytes(self) -> int:
        """As the driver says."""
        with told():
            free, _ = self._cuda.mem_get_info(self._device)
            return int(free)
