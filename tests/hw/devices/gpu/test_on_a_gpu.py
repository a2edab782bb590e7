"""The cuda and unified devices where there is a GPU: what the fake streams cannot show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xxhash")

from crisp.hw.devices.gpu.torch_cuda import TorchCuda  # noqa: E402
from crisp.hw.devices.options import DeviceOptions  # noqa: E402
from crisp.hw.replay import replay  # noqa: E402
from crisp.hw.store.packing import pack_synthetic  # noqa: E402
from crisp.hw.store.reader import Store  # noqa: E402
from crisp.model.spec import ModelSpec  # noqa: E402
from crisp.policy import Budget, named  # noqa: E402
from crisp.profile import Profile  # noqa: E402
from crisp.run.case import Case, Conditions  # noqa: E402
from crisp.trace import RoutingTrace  # noqa: E402
from crisp.trace.fitting import fit_to_trace  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TRACES = Path(__file__).parents[4] / "traces"


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def store(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Store:
    spec = ModelSpec.from_config(TRACES / "tiny-mixtral").with_(block=48)
    folder = tmp_path_factory.mktemp("made") / "store"
    return pack_synthetic(spec, folder, dtype=request.param)


def outputs(
    store: Store, options: DeviceOptions, budget: str, granularity: str, batch: int
) -> list[Any]:
    trace = RoutingTrace.load(TRACES / "tiny-mixtral-docs.trace.safetensors")
    conditions = Conditions(granularity, batch=batch, limit=24)
    one = Case(
        trace, fit_to_trace(store.spec, trace), named("lru"), Budget.parse(budget),
        Profile.from_trace(trace), conditions,
    )  # fmt: skip
    found: list[Any] = []
    replay(one, store, options, outputs=lambda out: found.append(out.cpu().numpy()))
    return found


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        DeviceOptions("cuda"), DeviceOptions("cuda", host_limit=0),
        DeviceOptions("unified", loads_from="memory"),
        DeviceOptions("unified", loads_from="mapped"), DeviceOptions("unified", loads_from="disk"),
    ],
    ids=str,
)  # fmt: skip
def test_outputs_are_the_cpus_and_the_same_bits_for_every_budget(
    store: Store, options: DeviceOptions, batch: int
) -> None:
    """bf16: hidden is rounded to it where rows are many: 2^-9 of a number, twice."""
    reference = outputs(store, DeviceOptions(), "10%", "block", batch)
    tolerance = 1e-4 if store.dtype == "fp32" else 2**-7
    bits: list[Any] = []
    for budget, granularity in (("10%", "block"), ("1%", "block"), ("30%", "expert")):
        found = outputs(store, options, budget, granularity, batch)
        for got, want in zip(found, reference, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())
        bits = bits or found
        assert all(map(np.array_equal, found, bits))


def test_streams_do_what_the_fake_ones_do() -> None:
    streams = TorchCuda()
    own, numbers = streams.stream(), np.arange(1 << 20, dtype=np.float32)
    with streams.on(own):
        there = streams.upload(numbers)
        numbers[:] = -1  # what was given is not what is copied from
        streams.launch(there.mul_, 2)
        event = streams.record()
    streams.wait(event)
    found, here = streams.download(there)
    here.synchronize()
    assert np.array_equal(found.numpy(), 2 * np.arange(1 << 20, dtype=np.float32))
    host = torch.zeros(1 << 20, dtype=torch.uint8)
    assert streams.register(host) is None
    assert streams.register(host) is not None  # twice
    streams.unregister(host)
