"""The machine that the report measures: its GPU, or a stand-in on the processor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from crisp.hw.devices.gpu.cuda import cuda
from crisp.hw.store.packing import pack_synthetic
from crisp.hw.store.reader import Store
from crisp.model.spec import ModelSpec

ROUNDS = 20


@dataclass(frozen=True)
class Machine:
    """The GPU that is measured, and the sizes that it is measured with."""

    streams: Any  # crisp.hw.devices.gpu.streams.DeviceStreams
    folder: Path  # for stores
    dry: bool  # on the processor, with few neurons
    device: str  # torch's name

    def spec(self, layers: int) -> ModelSpec:
        """Return the geometry of Mixtral's experts; in a dry run one of few neurons."""
        whole = ModelSpec.named("mixtral-8x7b").first_layers(layers)
        if not self.dry:
            return whole
        return ModelSpec(
            name="dry", n_layers=layers, moe_layers=tuple(range(layers)), n_experts=8, top_k=2,
            d_model=128, d_ff=256, dtype_bits=16, bits=Fraction(16), matrices=3, biases=False,
            dense_params=(0,) * layers, block=32, config_hash=None,
        )  # fmt: skip

    def store(self, name: str, layers: int, dtype: str = "bf16") -> Store:
        """Return a store of random experts, packed at the first call."""
        place = self.folder / f"{name}-{dtype}"
        return (
            Store.open(place)
            if place.exists()
            else pack_synthetic(self.spec(layers), place, dtype=dtype)
        )

    def milliseconds(self, work: Callable[[], object], rounds: int = ROUNDS) -> float:
        """Return the median time of ``work`` on the device in ms, each call timed by itself."""
        for _ in range(1 if self.dry else 3):
            work()
        times = []
        for _ in range(2 if self.dry else rounds):
            if self.dry:
                begin = time.perf_counter()
                work()
                times.append(1e3 * (time.perf_counter() - begin))
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)

    def options(self) -> Any:
        """Return what `replay` and `calibrate_device` open a device with."""
        return SimpleNamespace(
            device="cuda",
            read="direct",
            open=lambda store, slots: cuda(self.streams, store, slots),
            describe=lambda device: device.describe(),
        )
