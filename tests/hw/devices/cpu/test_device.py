"""The cpu device under `replay`: it decides as the simulator does, and computes the same always."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.hw.devices.cpu.device import CpuDevice
from crisp.hw.devices.options import DeviceOptions
from crisp.hw.devices.protocol import Copy
from crisp.hw.errors import DeviceError
from crisp.hw.replay import replay
from crisp.hw.store.packing import pack, pack_synthetic
from crisp.hw.store.reader import Store
from crisp.model.spec import ModelSpec
from crisp.policy import Budget, named
from crisp.profile import Profile
from crisp.run.case import Case, Conditions
from crisp.run.driver import replay_timeline
from crisp.run.sinks import FullTimeline
from crisp.run.timeline import BLOCKS, EXPERT, FIRST, KIND, LAYER_ID, LOAD, PREFETCH
from crisp.sim.hardware import hardware_profile
from crisp.sim.simulate import simulate
from crisp.trace import Header, RoutingTrace
from crisp.trace.fitting import fit_to_trace
from tests.hw.sampled import peak
from tests.hw.timelines import computed, of_kind

pytest.importorskip("torch")
pytest.importorskip("xxhash")

TRACES = Path(__file__).parents[4] / "traces"
TINY = TRACES / "tiny-mixtral"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return pack(TINY, tmp_path_factory.mktemp("made") / "store")


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    return RoutingTrace.load(TRACES / "tiny-mixtral-docs.trace.safetensors")


def case(
    trace: RoutingTrace, store: Store, name: str, budget: str, unit: str = "expert",
    granularity: str = "expert", batch: int = 1, **how: Any,
) -> Case:  # fmt: skip
    """Of 12 rows of the trace."""
    policy = named(name, unit=unit, **how)
    conditions = Conditions(granularity=granularity, batch=batch, limit=12)
    spec = fit_to_trace(store.spec, trace)
    return Case(trace, spec, policy, Budget.parse(budget), Profile.from_trace(trace), conditions)


def test_an_oracle_is_refused(trace: RoutingTrace, store: Store) -> None:
    with pytest.raises(CrispError, match="cache belady is an oracle that no device can follow"):
        replay(case(trace, store, "lru", "30%", cache="belady"), store, DeviceOptions())


def replayed(one: Case, store: Store, **how: Any) -> tuple[Any, list[list[int]], list[Any]]:
    """(timeline, residency after every event, outputs)."""
    everything, states, outputs = FullTimeline(), [], []
    replay(
        one, store, DeviceOptions(**how), sinks=[everything],
        watch=lambda scheduler: states.append(list(scheduler.residency.resident)),
        outputs=lambda out: outputs.append(out.numpy().copy()),
    )  # fmt: skip
    return everything.rows, states, outputs


@pytest.mark.parametrize(
    ("name", "how"),
    [("fo", {}), ("lru", {}), ("mo", {"prefetch": "guess"}), ("crisp", {"batch": 3}), ("up", {})],
)
def test_results_do_not_depend_on_budget_order_unit_and_granularity(
    trace: RoutingTrace, store: Store, name: str, how: dict[str, Any]
) -> None:
    """Nor on threads or a slower link: bit for bit, for the widths that a policy asks for."""
    if name in ("up", "crisp"):  # which otherwise take what is resident into account
        how = how | {"width": "full"}
    reference: list[Any] | None = None
    cells: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"budget": "0.5%"}, {}),
        ({"budget": "10%", "granularity": "block", "unit": "block"}, {}),
        ({"budget": "30%", "unit": "block"}, {"verify": True}),
        ({"budget": "30%", "granularity": "block", "order": "random"}, {"threads": 2}),
        ({"budget": "10%", "order": "widest"}, {}),
        ({"budget": "100%"}, {"link_limit": 10**9}),
    ]
    for asked, options in cells:
        _, _, outputs = replayed(case(trace, store, name, **asked, **how), store, **options)
        reference = reference or outputs
        assert len(outputs) == len(reference) > 0
        for got, expected in zip(outputs, reference, strict=True):
            np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32))
            assert np.isfinite(got).all()
            assert np.abs(got).max() > 0


@pytest.mark.parametrize(
    ("name", "budget", "unit", "granularity"),
    [("fo", "10%", "expert", "expert"), ("lru", "20%", "block", "block"),
     ("crisp", "15%", "block", "expert"), ("up", "30%", "expert", "block")],
)  # fmt: skip
def test_it_decides_as_the_simulator_does(
    trace: RoutingTrace, store: Store, name: str, budget: str, unit: str, granularity: str
) -> None:
    one = case(trace, store, name, budget, unit, granularity)
    rows, states, _ = replayed(one, store)
    everything, expected = FullTimeline(), list[list[int]]()
    simulate(
        one, hardware_profile("rtx4090-pcie4"), sinks=[everything],
        watch=lambda scheduler: expected.append(list(scheduler.residency.resident)),
    )  # fmt: skip
    assert of_kind(rows, LOAD) == of_kind(everything.rows, LOAD)
    assert computed(rows) == computed(everything.rows)
    assert states == expected


@pytest.mark.parametrize("unit", ["expert", "block"])
@pytest.mark.parametrize("prefetch", ["guess", "previous"])
def test_a_prefetching_run_can_be_lived_through_again(
    trace: RoutingTrace, store: Store, unit: str, prefetch: str
) -> None:
    one = case(trace, store, "mo", "20%", unit, prefetch=prefetch)
    rows, states, _ = replayed(one, store)
    scheduler, workload = one.scheduler(None), one.workload()

    def residents(layer: int) -> list[int]:
        start = one.spec.moe_layers.index(layer) * one.spec.n_experts
        return scheduler.residency.resident[start : start + one.spec.n_experts]

    def events() -> Any:
        for event in workload.events(one.steps()):
            yield event.layer, workload.tasks(event, residents), event.guess, None

    loads, again = [], list[list[int]]()
    for load, _ in replay_timeline(
        scheduler,
        events(),
        rows,
        lambda scheduler: again.append(list(scheduler.residency.resident)),
    ):
        if load is not None:
            layer = one.spec.moe_layers[load.row]
            loads.append([layer, load.expert, load.first, load.blocks])
    measured = rows[np.isin(rows[:, KIND], (LOAD, PREFETCH))]
    copies = measured[:, [LAYER_ID, EXPERT, FIRST, BLOCKS]].tolist()
    assert any(rows[:, KIND] == PREFETCH)
    assert loads[: len(copies)] == copies[: len(loads)]
    assert again == states


def test_what_it_says_of_itself(store: Store) -> None:
    with closing(CpuDevice(store, 8, threads=2, link_limit=5, verify=True)) as device:
        said = device.describe()
        assert len(threading.enumerate()) > 2
    assert set(said) == {
        "name", "threads", "read_bytes", "read", "direct", "asynchronous", "reads_in_flight",
        "why_not_direct", "link_limit", "verify",
    }  # fmt: skip
    assert (said["name"], said["threads"], said["link_limit"]) == ("cpu", 2, 5)
    assert said["verify"]
    assert said["direct"] == (said["why_not_direct"] is None)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_a_store_where_direct_reading_is_impossible(tmp_path: Path) -> None:
    """A tmpfs refuses it in some kernels, and takes it in others; blocks come either way."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = pack_synthetic(ModelSpec.from_config(TINY).first_layers(1), Path(folder) / "store")
        with closing(CpuDevice(store, 7)) as device:
            assert device.describe()["direct"] == (device.describe()["why_not_direct"] is None)
            run_copy(device, Copy(0, 3, 0, range(7)))
            begin = store.offset(0, 3, 0)
            expected = store.files[0].read_bytes()[begin : begin + store.spec.expert_bytes]
            assert device.pool.tobytes() == expected


def run_copy(device: CpuDevice, request: Copy) -> None:
    failures, over = list[BaseException | None](), threading.Event()

    def done(_: int, failure: BaseException | None) -> None:
        failures.append(failure)
        over.set()

    device.copy(request, done)
    assert over.wait(30)
    if failures[0] is not None:
        raise failures[0]


def status(key: str) -> int:
    """kB (or a number) from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def test_the_pool_is_given_back_and_nothing_else_is_kept(store: Store) -> None:
    slots = 64 * (1 << 20) // store.spec.block_bytes
    CpuDevice(store, 8, threads=2).close()
    gc.collect()
    files, threads, before = (
        len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), status("RssAnon"),
    )  # fmt: skip
    kept = [CpuDevice(store, slots, threads=1 + i % 2) for i in range(2)]
    assert status("RssAnon") - before > 120 * 1024  # all of both pools is there
    for device in kept:
        device.close()
        device.close()
    assert status("RssAnon") - before < 10 * 1024  # while the devices are still held
    for i in range(20):
        CpuDevice(store, slots, threads=1 + i % 2).close()
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    assert threading.active_count() == threads
    assert status("RssAnon") - before < 10 * 1024


def cached_pages(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    libc, found = ctypes.CDLL(None, use_errno=True), (ctypes.c_ubyte * pages)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found) == 0
    return sum(page & 1 for page in found)


@pytest.mark.parametrize("direct", [True, False])
def test_nothing_of_a_store_stays_in_the_page_cache(
    trace: RoutingTrace, store: Store, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if not direct:
        real = os.open

        def without(path: Any, flags: int, *more: Any, **named: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
            return real(path, flags, *more, **named)

        monkeypatch.setattr(os, "open", without)
    for path in store.files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not on the disk yet cannot be let go
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_pages(path):
            pytest.skip("this file system is in memory")
        path.read_bytes()
        assert cached_pages(path)
    again = Store.open(store.path)
    replayed(case(trace, store, "lru", "10%"), again)
    assert [cached_pages(path) for path in store.files] == [0] * len(store.files)


def test_buffered_reads_stay_in_the_page_cache_and_change_no_bit(
    trace: RoutingTrace, store: Store
) -> None:
    """All that the run has loaded, at least; and nothing of it after a run that keeps nothing."""
    one = case(trace, store, "fo", "10%")
    rows, _, outputs = replayed(one, store)
    for path in store.files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_pages(path):
            pytest.skip("this file system is in memory")
    again = replayed(one, store, read="buffered")
    assert all(map(np.array_equal, again[2], outputs))
    assert len(again[2]) == len(outputs)
    pages = sum(cached_pages(path) for path in store.files)
    used = {(row[LAYER_ID], row[EXPERT]) for row in rows.tolist() if row[KIND] == LOAD}
    assert pages * mmap.PAGESIZE >= len(used) * store.spec.expert_bytes
    replayed(one, store, read="uncached")
    assert [cached_pages(path) for path in store.files] == [0] * len(store.files)


@pytest.mark.slow
def test_memory_is_the_budget_and_little_more(tmp_path: Path) -> None:
    """2.1 GB of experts of Mixtral's sizes at 10 %: budget, staging and 100 MB."""
    spec = ModelSpec.named("mixtral-8x7b").first_layers(1)
    store = pack_synthetic(spec, tmp_path / "store")
    assert store.spec.routed_bytes > 2e9
    made = tmp_path / "one.trace.safetensors"
    draw = np.random.default_rng(0)
    routed = np.array([draw.permutation(8)[:2] for _ in range(6)], np.int16)[:, None]
    RoutingTrace(
        experts=routed, guess=None, sequence=np.zeros(6, np.int32),
        position=np.arange(6, dtype=np.int32), phase=np.ones(6, np.uint8),
        header=Header(n_experts=8, top_k=2, ordered=True, origin="synthetic", seed=0),
    ).save(made)  # fmt: skip
    used = peak("replay", made, "--store", store.path, "--policy", "lru", "--budget", "10%")
    budget, staging = 0.1 * store.spec.routed_bytes, 2 * store.spec.expert_bytes
    assert used < budget + staging + 100e6
    assert used > 0.5 * budget


def in_order(device: CpuDevice, *copies: Copy) -> list[BaseException | None]:
    """One after the other, as a link has them."""
    failures = list[BaseException | None]()
    for copy in copies:
        over = threading.Event()

        def done(_: int, failure: BaseException | None, over: threading.Event = over) -> None:
            failures.append(failure)
            over.set()

        device.copy(copy, done)
        assert over.wait(30)
    return failures


def held(device: CpuDevice, *slots: int) -> bytes:
    return b"".join(device.pool[slot].tobytes() for slot in slots)


def stored(store: Store, row: int, expert: int, first: int, last: int) -> bytes:
    content = store.files[row].read_bytes()
    return content[store.offset(row, expert, first) : store.offset(row, expert, last)]


def test_what_follows_has_begun(store: Store) -> None:
    """It comes to the slot that was named, and is not read twice."""
    begun = list[tuple[int, int, int]]()
    with closing(CpuDevice(store, 8)) as device:
        real = device._files.begin

        def begin(row: int, expert: int, first: int, places: Any) -> Any:
            begun.append((row, expert, first))
            return real(row, expert, first, places)

        device._files.begin = begin  # type: ignore[method-assign]
        after = [[6, 5], [5, 4], [4, 3], [3], []]
        copies = [Copy(1, 3, b, [7 - b], then) for b, then in enumerate(after)]
        assert in_order(device, *copies) == [None] * 5
        assert begun == [(1, 3, b) for b in range(5)]
        assert held(device, 7, 6, 5, 4, 3) == stored(store, 1, 3, 0, 5)


def test_what_was_to_follow_and_does_not_is_waited_for(store: Store) -> None:
    """Then its slot may be anybody's."""
    with closing(CpuDevice(store, 8)) as device:
        copies = [Copy(1, 3, 0, [0], [1, 2]), Copy(0, 2, 5, [1], [2]), Copy(1, 3, 1, [2], [3])]
        assert in_order(device, *copies) == [None] * 3
        assert held(device, 0) == stored(store, 1, 3, 0, 1)
        assert held(device, 1) == stored(store, 0, 2, 5, 6)
        assert held(device, 2) == stored(store, 1, 3, 1, 2)


def test_what_follows_fails_when_it_is_asked_for(store: Store, tmp_path: Path) -> None:
    own = pack_synthetic(store.spec, tmp_path / "store")
    with closing(CpuDevice(own, 8)) as device:
        os.truncate(own.files[1], own.offset(1, 3, 1))
        first, then = in_order(device, Copy(1, 3, 0, [0], [1]), Copy(1, 3, 1, [1]))
        assert first is None
        assert isinstance(then, DeviceError)
