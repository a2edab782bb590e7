"""The host's part of the cuda and unified devices, on streams that run as late as they may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.hw.decisions import DecisionLog, replay_decisions
from crisp.hw.devices.gpu import cuda as cuda_module
from crisp.hw.devices.gpu.arena import Arena
from crisp.hw.devices.gpu.cuda import cuda
from crisp.hw.devices.gpu.device import GpuDevice
from crisp.hw.devices.gpu.sources import FromArena, FromDisk
from crisp.hw.devices.gpu.unified import fastest, unified
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.devices.protocol import WAYS
from crisp.hw.errors import DeviceError
from crisp.hw.replay import replay
from crisp.hw.store.packing import pack_synthetic
from crisp.hw.store.reader import Store
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.run.case import Case, Conditions
from crisp.run.sinks import FullTimeline
from crisp.run.timeline import BLOCKS, EVENT, EXPERT, FIRST, KIND, LAYER_ID, LOAD
from crisp.sim.hardware import hardware_profile
from crisp.sim.simulate import simulate
from crisp.trace import RoutingTrace
from crisp.trace.fitting import fit_to_trace
from tests.hw.devices.gpu.fake_streams import FakeEvent, FakeStreams

torch = pytest.importorskip("torch")
pytest.importorskip("xxhash")

TRACES = Path(__file__).parents[4] / "traces"
Opens = Callable[[FakeStreams, Store, int], GpuDevice]

DEVICES: dict[str, Opens] = {
    "cuda": cuda,
    "cuda-disk": lambda *own: cuda(*own, host_limit=0, staging=8192),
    **{way: lambda *own, way=way: unified(*own, way=way) for way in WAYS},  # type: ignore[misc]
    "unified": unified,
}


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    return RoutingTrace.load(TRACES / "tiny-mixtral-docs.trace.safetensors")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, trace: RoutingTrace) -> Store:
    from crisp.model.spec import ModelSpec

    spec = ModelSpec.from_config(TRACES / "tiny-mixtral").with_(block=48)
    return pack_synthetic(spec, tmp_path_factory.mktemp("made") / "store", dtype="fp32")


def case(trace: RoutingTrace, store: Store, name: str, budget: str, **how: Any) -> Case:
    conditions = Conditions(how.pop("granularity", "block"), batch=how.pop("batch", 1), limit=8)
    policy, spec = named(name, **how), fit_to_trace(store.spec, trace)
    return Case(trace, spec, policy, Budget.parse(budget), Profile.from_trace(trace), conditions)


def openable(opens: Callable[[Store, int], GpuDevice]) -> Any:
    """In place of DeviceOptions: opens such a device."""
    return SimpleNamespace(open=opens, describe=lambda device: device.describe())


def replayed(
    one: Case, store: Store, opens: Opens, seed: int
) -> tuple[list[Any], DecisionLog, Any]:
    """(outputs, what was decided, the run)."""
    streams, outputs, seen = FakeStreams(seed), list[Any](), DecisionLog()
    options: Any = openable(lambda own, slots: opens(streams, own, slots))
    run = replay(
        one, store, options, sinks=[seen.sink], watch=seen.watch,
        outputs=lambda out: outputs.append(streams.read(out).numpy()),
    )  # fmt: skip
    assert not streams.registered, "memory that is still page-locked"
    return outputs, seen, run


def expected(one: Case, store: Store) -> list[Any]:
    """The cpu device's outputs."""
    outputs: list[Any] = []
    replay(one, store, DeviceOptions(), outputs=lambda out: outputs.append(out.numpy().copy()))
    return outputs


def same(outputs: list[Any], reference: list[Any]) -> bool:
    """Up to rounding: sums of 320 products of numbers near 1, in float32."""
    return len(outputs) == len(reference) > 0 and all(
        np.allclose(got, want, rtol=1e-4, atol=1e-5)
        for got, want in zip(outputs, reference, strict=True)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [1, 3])
def test_outputs_are_the_cpus_in_whatever_order_streams_run(
    trace: RoutingTrace, store: Store, device: str, batch: int
) -> None:
    """And the same bits for every budget, granularity and order of the streams."""
    reference = expected(case(trace, store, "lru", "10%", batch=batch), store)
    bits: list[Any] = []
    for seed, (budget, granularity) in enumerate(
        [("10%", "block"), ("1%", "block"), ("30%", "expert"), ("100%", "block")]
    ):
        one = case(trace, store, "lru", budget, granularity=granularity, batch=batch)
        outputs, _, _ = replayed(one, store, DEVICES[device], seed)
        assert same(outputs, reference)
        bits = bits or outputs
        assert all(map(np.array_equal, outputs, bits))


@pytest.mark.parametrize("device", ["cuda", "cuda-disk", "disk"])
def test_it_decides_as_the_simulator_does(trace: RoutingTrace, store: Store, device: str) -> None:
    one = case(trace, store, "crisp", "15%", unit="block", width="full")
    _, seen, _ = replayed(one, store, DEVICES[device], 0)
    everything = FullTimeline()
    simulate(one, hardware_profile("rtx4090-pcie4"), sinks=[everything])
    columns = [EVENT, LAYER_ID, EXPERT, FIRST, BLOCKS]
    loads = [rows[rows[:, KIND] == LOAD][:, columns] for rows in (everything.rows, seen.sink.rows)]
    assert np.array_equal(*loads)


@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_prefetches_can_be_lived_through_again(
    trace: RoutingTrace, store: Store, seed: int
) -> None:
    one = case(trace, store, "mo", "10%", prefetch="guess")
    outputs, seen, _ = replayed(one, store, cuda, seed)
    assert same(outputs, expected(one, store))
    assert replay_decisions(one, seen)


# -- a wait that is missing is found -----------------------------------------------------------


def begins_unseen(self: Any, request: Any) -> Callable[[], None]:
    """FromArena.begin, but nobody waits for the copies."""
    FROM_ARENA(self, request)
    return lambda: None


def launches_unseen(self: Any, piece: Any) -> Callable[[], None]:
    """GpuDevice._launch, but nobody waits for the kernels: their slots are overwritten."""
    LAUNCH(self, piece)
    return lambda: None


class Hasty(FakeStreams):
    """Streams which leave out the waits of one kind."""

    leaves_out = ""

    def wait(self, event: FakeEvent) -> None:
        of_caller = event.stream is self._caller
        if self.leaves_out != ("caller" if of_caller else "compute"):
            super().wait(event)


FROM_ARENA, LAUNCH, THROUGH = FromArena.begin, GpuDevice._launch, FromDisk._copy_through_buffers


def without_turns(self: Any, stream: Any, request: Any) -> None:
    """As FromDisk does, but a buffer is filled again while it is still being copied."""
    self._copied = _Nothing()
    THROUGH(self, stream, request)


class _Nothing:
    def __getitem__(self, place: int) -> None:
        return None

    def __setitem__(self, place: int, value: Any) -> None:
        pass


@pytest.fixture
def plants(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def plant(fault: str) -> None:
        if fault == "copies":
            monkeypatch.setattr(FromArena, "begin", begins_unseen)
        elif fault == "kernels":
            monkeypatch.setattr(GpuDevice, "_launch", launches_unseen)
        elif fault == "buffers":
            monkeypatch.setattr(FromDisk, "_copy_through_buffers", without_turns)
        else:
            monkeypatch.setattr(Hasty, "leaves_out", fault)

    yield plant


@pytest.mark.parametrize(
    ("fault", "device"),
    [
        ("copies", "cuda"), ("kernels", "cuda"), ("buffers", "cuda-disk"), ("caller", "cuda"),
        ("compute", "cuda"),
    ],
)  # fmt: skip
def test_a_missing_wait_gives_other_outputs(
    trace: RoutingTrace, store: Store, plants: Callable[[str], None], fault: str, device: str
) -> None:
    one = case(trace, store, "lru", "1%")
    reference = expected(one, store)

    def right(seed: int) -> bool:
        streams, outputs = Hasty(seed), list[Any]()

        def opens(own: Store, slots: int) -> GpuDevice:
            made = DEVICES[device](streams, own, slots)
            place = made.place

            def late(hidden: Any) -> Any:  # the caller's rows are made on its stream, late
                rows = streams.empty(*hidden.shape, dtype="float32")
                streams.launch(rows.copy_, hidden)
                return place(rows)

            made.place = late  # type: ignore[method-assign]
            return made

        options: Any = openable(opens)
        replay(one, store, options, outputs=lambda out: outputs.append(streams.read(out).numpy()))
        return same(outputs, reference)

    assert all(right(seed) for seed in range(4))
    plants(fault)
    assert not all(right(seed) for seed in range(4))


# -- memory ----------------------------------------------------------------------------------------


def test_an_arena_is_of_the_exact_size_and_no_block_lies_in_two_chunks() -> None:
    streams = FakeStreams(0)
    arena = Arena(streams, 4096, 7, chunk=3 * 4096 + 100)
    assert [chunk.shape for chunk in arena.chunks] == [(3, 4096), (3, 4096), (1, 4096)]
    assert sum(own.nbytes for own in streams.registered) == 7 * 4096
    for index in range(7):
        arena.block(index)[:] = index
        assert arena.block(index).data_ptr() % 4096 == 0
    assert [int(arena.block(index)[4095]) for index in range(7)] == list(range(7))
    arena.close()
    arena.close()
    assert not streams.registered


def test_what_cannot_be_page_locked_is_used_all_the_same(trace: RoutingTrace, store: Store) -> None:
    one = case(trace, store, "lru", "10%")
    streams, outputs = FakeStreams(1), list[Any]()
    streams.refused = "out of memory"
    options: Any = openable(lambda own, slots: cuda(streams, own, slots))
    run = replay(one, store, options, outputs=lambda out: outputs.append(streams.read(out).numpy()))
    assert same(outputs, expected(one, store))
    assert run.settings["device"]["pageable"] == "out of memory"
    for way in ("mapped", "disk"):
        with pytest.raises(CrispError, match="the GPU cannot reach host memory: out of memory"):
            unified(streams, store, 100, way=way)
    device = unified(streams, store, 100)
    assert device.describe()["loads_from"] == "memory"
    device.close()


def test_too_large_a_pool_is_refused(store: Store) -> None:
    with pytest.raises(CrispError, match="a smaller --budget was expected"):
        cuda(FakeStreams(0, room=store.spec.block_bytes * 9), store, 10)


def test_without_room_for_the_weights_they_come_from_the_disk(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = 20 * store.spec.block_bytes
    for room, ways in (
        (store.spec.routed_bytes + pool, ("memory", "mapped")),
        (store.spec.routed_bytes, ("mapped",)),
        (store.spec.routed_bytes - 1, ("disk",)),
    ):
        monkeypatch.setattr(
            "crisp.hw.devices.gpu.unified.available_bytes",
            lambda room=room: room + cuda_module.HEADROOM,
        )
        device = unified(FakeStreams(0), store, 20)
        assert device.describe()["loads_from"] in ways
        device.close()
        monkeypatch.setattr(
            cuda_module, "available_bytes", lambda room=room: room + cuda_module.HEADROOM
        )
        device = cuda(FakeStreams(0), store, 20)
        assert device.describe()["loads_from"] == ("disk" if ways == ("disk",) else "memory")
        device.close()
    monkeypatch.setattr(
        "crisp.hw.devices.gpu.unified.available_bytes", lambda: pool - 1 + cuda_module.HEADROOM
    )
    with pytest.raises(CrispError, match=r"of memory are needed.*are left to the system"):
        unified(FakeStreams(0), store, 20)
    with pytest.raises(CrispError, match="did you mean 'mapped'"):
        DeviceOptions("unified", loads_from="maped")


def test_the_faster_way_with_every_other_use_a_hit() -> None:
    figures = {"memory_load_ns": 100, "memory_compute_ns": 50, "mapped_load_ns": 0}
    assert fastest(figures | {"mapped_compute_ns": 100}) == "mapped"
    assert fastest(figures | {"mapped_compute_ns": 101}) == "memory"


def test_what_the_device_complains_of_ends_the_run(
    trace: RoutingTrace, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(1000))

    def broken(*_: Any) -> None:
        if next(calls) == 7:
            raise DeviceError("cuda: an illegal memory access was encountered")

    monkeypatch.setattr("crisp.hw.devices.gpu.kernels.add_blocks", broken)
    with pytest.raises(DeviceError, match="illegal memory access"):
        replayed(case(trace, store, "lru", "10%"), store, cuda, 0)
