"""An expert's blocks against a plain computation in double precision."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from platform import machine
from typing import Any

import numpy as np
import pytest

from crisp.hw.devices.batch import ExpertBatch
from crisp.hw.devices.cpu import kernels as cpu_kernels
from crisp.hw.devices.cpu.arithmetic import Arithmetic
from crisp.hw.devices.protocol import BlockRange
from crisp.hw.store.packing import pack_synthetic
from crisp.hw.store.reader import TORCH_TYPES, BlockViews, Store, view_blocks
from crisp.model.spec import ModelSpec

torch = pytest.importorskip("torch")
pytest.importorskip("xxhash")


def spec(d_model: int, d_ff: int, block: int, biases: bool = False, matrices: int = 3) -> ModelSpec:
    return ModelSpec(
        name="small", n_layers=1, moe_layers=(0,), n_experts=2, top_k=1, d_model=d_model,
        d_ff=d_ff, dtype_bits=16, bits=Fraction(16), matrices=matrices, biases=biases,
        dense_params=(0,), block=block, config_hash=None,
    )  # fmt: skip


# odd widths of a row; more columns than a tile; a short last block, one of less than 4 neurons
SHAPES = [spec(80, 40, 16), spec(192, 320, 48), spec(4100, 34, 16), spec(80, 48, 48)]
KINDS = [(s, dtype, "silu") for s in SHAPES for dtype in ("bf16", "fp16", "fp32")]
KINDS += [(SHAPES[0], "bf16", "gelu"), (SHAPES[1], "fp32", "gelu")]
KINDS += [(spec(80, 40, 16, True), dtype, "gpt_oss") for dtype in ("bf16", "fp16", "fp32")]
# int8 and int4 have whole groups of 64 columns, of which some are more than a tile
GROUPS = [spec(192, 320, 48), spec(4160, 34, 16), spec(64, 48, 48)]
KINDS += [(s, dtype, "silu") for s in GROUPS for dtype in ("int8", "int4")]
KINDS += [(GROUPS[0], "int8", "gelu")]
# so much that threads share it, with chunks and neurons that do not come out even
LARGE = spec(1088, 250, 112)
KINDS += [(LARGE, dtype, "silu") for dtype in ("bf16", "fp16", "fp32", "int8", "int4")]
KINDS += [(spec(128, 40, 16, True), dtype, "gpt_oss") for dtype in ("int8", "int4")]
# every other activation, with a gate and, where it takes one number, without
LIMITED = ("clamped_silu(0.5)", "silu_clamped(0.25)", "softcapped_silu(1,2)", "gpt_oss(1.3,0.5)")
KINDS += [(SHAPES[0], "fp32", kind) for kind in ("gelu_tanh", "relu", "relu2", *LIMITED)]
KINDS += [(GROUPS[2], "int8", kind) for kind in ("gelu_tanh", *LIMITED)]
BARE = [spec(80, 40, 16, matrices=2), spec(128, 40, 16, True, 2)]
KINDS += [(BARE[0], "fp32", kind) for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2")]
KINDS += [(BARE[1], dtype, "relu2") for dtype in ("bf16", "int8", "int4")]
WIDTHS = {1: [3], 3: [1, 3, 2], 17: [1 + i % 3 for i in range(17)]}


@pytest.fixture(
    scope="module", params=KINDS, ids=lambda k: f"{k[0].d_model}-{k[0].matrices}-{k[1]}-{k[2]}"
)
def store(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Store:
    shape, dtype, activation = request.param
    folder = tmp_path_factory.mktemp("stores") / "store"
    return pack_synthetic(shape, folder, dtype=dtype, activation=activation)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return pack_synthetic(SHAPES[1], tmp_path_factory.mktemp("small") / "store")


def blocks(store: Store) -> Any:
    """Expert 1's, as read from its file: uint8 [blocks, stride]."""
    begin = store.offset(0, 1, 0)
    raw = store.files[0].read_bytes()[begin : begin + store.spec.expert_bytes]
    return np.frombuffer(raw, np.uint8).reshape(store.spec.n_blocks, -1)


def pool_of(store: Store, slots: list[int], total: int) -> Any:
    """The expert's blocks in these slots; everything else is NaN in every type of number, the
    neurons that a short last block lacks and the padding behind it too."""
    pool = np.full((total, store.spec.block_bytes), 0xFF, np.uint8)
    spec = store.spec
    real = [spec.neurons(block, block + 1) for block in range(spec.n_blocks)]
    given, kept = torch.from_numpy(blocks(store).copy()), torch.from_numpy(pool)
    for block, slot in enumerate(slots):
        source, into = view_blocks(given[block], store), view_blocks(kept[slot], store)
        for part, place in zip(source[:-1], into[:-1], strict=True):
            if part is not None:
                place[: real[block]] = part[: real[block]]
        if source.scales is not None:
            into.scales[:, : real[block]] = source.scales[:, : real[block]]
    return pool


def hidden(store: Store, rows: int, loud: float = 1) -> Any:
    made = torch.randn(rows, store.spec.d_model, generator=torch.Generator().manual_seed(rows))
    return (loud * made).to(getattr(torch, TORCH_TYPES[store.dtype]))


def work(x: Any, widths: list[int]) -> ExpertBatch:
    rows = np.arange(len(widths))
    return ExpertBatch(1, rows, np.array(widths), np.ones(len(widths), np.float32), x)


def weights(part: BlockViews, which: int) -> Any:
    """Gate, up or down [blocks, block, d_model], as they are or from whole numbers and scales."""
    matrix = part[which]
    if part.scales is None or matrix is None:
        return matrix
    if matrix.dtype == torch.uint8:  # the even column is low
        nibbles = torch.stack([matrix % 16, matrix // 16], -1).flatten(-2).double()
        matrix = torch.where(nibbles > 7, nibbles - 16, nibbles)
    scales = part.scales[:, which if part.gate is not None else which - 1].double()
    return (matrix.double().unflatten(-1, (-1, 64)) * scales[..., None]).flatten(-2)


def sums(arithmetic: Arithmetic, one: ExpertBatch) -> Any:
    """Return the batch's sums, in the order of its rows and of the model's columns."""
    return arithmetic.combine([one], len(one.rows)).numpy()[one.rows]


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.maximum(x, -700)))


ALONE: dict[str, Any] = {
    "silu": lambda g: g * sigmoid(g),
    "gelu": lambda g: g * np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in g]),
    "gelu_tanh": lambda g: g * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
    "relu": lambda g: np.where(g > 0, g, 0),
    "relu2": lambda g: np.where(g > 0, g * g, 0),
}
TOGETHER: dict[str, Any] = {
    "gpt_oss": lambda g, u, a, b: (
        np.minimum(g, b) * sigmoid(a * np.minimum(g, b)) * (np.clip(u, -b, b) + 1)
    ),
    "clamped_silu": lambda g, u, a: ALONE["silu"](np.minimum(g, a)) * np.clip(u, -a, a),
    "silu_clamped": lambda g, u, a: np.minimum(ALONE["silu"](g), a) * np.clip(u, -a, a),
    "softcapped_silu": lambda g, u, a, b: a * np.tanh(g / a) * sigmoid(g) * b * np.tanh(u / b),
}


def activation(name: str, gate: Any, up: Any) -> Any:
    kind, _, constants = name.rstrip(")").partition("(")
    if kind in TOGETHER:
        numbers = constants or "1.702,7"  # gpt_oss's own
        return TOGETHER[kind](gate, up, *map(float, numbers.split(",")))
    return ALONE[kind](up) if gate is None else ALONE[kind](gate) * up


def expected(store: Store, x: Any, width: int) -> tuple[Any, Any]:
    """Of one row [d_model] and its leading blocks: the sum, and the sum of all magnitudes."""
    part = view_blocks(torch.from_numpy(blocks(store).copy()), store)
    n = store.spec.neurons(0, width)

    def numbers(tensor: Any) -> Any:
        return tensor[:width].double().numpy().reshape(-1, *tensor.shape[2:])[:n]

    x = x.double().numpy()
    gate, up, down = (
        None if w is None else numbers(w) for w in (weights(part, i) for i in range(3))
    )
    gate, up = None if gate is None else gate @ x, up @ x
    if part.gate_bias is not None:
        gate = gate + numbers(part.gate_bias)
    if part.up_bias is not None:
        up = up + numbers(part.up_bias)
    mid = activation(store.activation, gate, up)
    return mid @ down, np.abs(mid) @ np.abs(down)


def test_the_sum_is_that_of_double_precision(store: Store) -> None:
    """A float32 sum of d and n terms errs by at most some (d + n) / 2 units of 2^-24, and the
    errors of signs that come by chance by about the root of that: 2^-24 x 8 sqrt(d + n)."""
    n_blocks = store.spec.n_blocks
    slots = list(range(2 * n_blocks, 0, -2))
    for rows, wanted in WIDTHS.items():
        widths = [min(width, n_blocks) for width in wanted]
        arithmetic = Arithmetic(store, pool_of(store, slots, 2 * n_blocks + 1), 1)
        x = hidden(store, rows)
        x[0] *= 30 if store.activation == "gpt_oss" else 1  # as far as its clamps, of both signs
        one = work(arithmetic.inputs(x), widths)
        arithmetic.add(BlockRange(one, 0, slots[: max(widths)]))
        for row, got in zip(one.rows, sums(arithmetic, one), strict=True):
            exact, size = expected(store, x[row], widths[row])
            terms = store.spec.d_model + store.spec.d_ff
            allowed = 2**-24 * 8 * math.sqrt(terms) * size.max()
            assert np.abs(got - exact).max() <= allowed
            assert np.abs(exact).max() > 100 * allowed  # else the test would say nothing
        arithmetic.close()


def test_the_same_to_the_bit_in_pieces_or_at_once_anywhere_with_any_threads(store: Store) -> None:
    n_blocks, draw = store.spec.n_blocks, np.random.default_rng(0)
    results = []
    for threads, cuts in [(1, 0), (1, n_blocks), (1, 1), (2, 0), (2, n_blocks), (3, 1)]:
        total = 3 * n_blocks
        slots = [int(slot) for slot in draw.permutation(total)[:n_blocks]]
        arithmetic = Arithmetic(store, pool_of(store, slots, total), threads)
        arithmetic.prepare()
        one = work(
            arithmetic.inputs(hidden(store, 17)), [min(width, n_blocks) for width in WIDTHS[17]]
        )
        ends = {0: [n_blocks], 1: [1, n_blocks]}.get(cuts, list(range(1, n_blocks + 1)))
        widest, first = len(one.counts), 0
        for end in dict.fromkeys(min(end, widest) for end in ends):
            arithmetic.add(BlockRange(one, first, slots[first:end]))
            first = end
        results.append(one.sums.copy())
        arithmetic.close()
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.int32), other.view(np.int32))
    assert np.isfinite(results[0]).all()


def test_a_row_does_not_depend_on_those_beside_it(small: Store) -> None:
    slots = list(range(small.spec.n_blocks))
    arithmetic = Arithmetic(small, pool_of(small, slots, len(slots)), 1)
    x = hidden(small, 17)
    together = work(arithmetic.inputs(x), [1 + i % 7 for i in range(17)])
    arithmetic.add(BlockRange(together, 0, slots))
    for row, got in zip(together.rows, together.sums, strict=True):
        alone = work(arithmetic.inputs(x[row : row + 1]), [1 + int(row) % 7])
        arithmetic.add(BlockRange(alone, 0, slots[: 1 + int(row) % 7]))
        np.testing.assert_array_equal(alone.sums[0], got)


def test_many_rows_are_computed_some_at_a_time(
    small: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths differ, so that of later rows fewer blocks are computed, and of the last ones few."""
    slots, sums = list(range(small.spec.n_blocks)), []
    for rows in (17, 4, 5):
        monkeypatch.setattr("crisp.hw.devices.cpu.arithmetic._ROWS", rows)
        arithmetic = Arithmetic(small, pool_of(small, slots, len(slots)), 1)
        one = work(arithmetic.inputs(hidden(small, 17)), [1 + i % 7 for i in range(17)])
        arithmetic.add(BlockRange(one, 0, slots))
        sums.append(one.sums)
    np.testing.assert_array_equal(sums[0], sums[1])
    np.testing.assert_array_equal(sums[0], sums[2])


def test_great_numbers_stay_what_they_are(small: Store) -> None:
    """A gate far below 0 gives 0, whose exponential is infinite on the way; NaN stays NaN."""
    slots = list(range(small.spec.n_blocks))
    arithmetic = Arithmetic(small, pool_of(small, slots, len(slots)), 1)
    x = hidden(small, 2, loud=1e4)
    x[1, 5] = math.nan
    one = work(arithmetic.inputs(x), [7, 7])
    arithmetic.add(BlockRange(one, 0, slots))
    exact, size = expected(small, x[0], 7)
    assert np.abs(one.sums[0] - exact).max() <= 1e-5 * size.max()
    assert np.isnan(one.sums[1]).all()


def test_outputs_are_weighted_and_summed_by_ascending_expert(small: Store) -> None:
    arithmetic = Arithmetic(small, pool_of(small, [0], 1), 1)
    made = []
    # 2^24 + 1 rounds to 2^24 in float32, so row 2 is (2^24 + 1) - 2^24 = 0, the other way round 1
    for expert, rows, weight in ((2, [0, 2], -(2**24)), (1, [2], 1), (0, [2], 2**24)):
        one = work(None, [1] * len(rows))
        one.expert, one.rows = expert, np.array(rows)
        one.weights = np.full(len(rows), weight, np.float32)
        one.sums = np.ones((len(rows), small.spec.d_model), np.float32)
        made.append(one)
    out = arithmetic.combine(made, 3).numpy()
    assert out[:, 0].tolist() == [-(2**24), 0, 0]
    assert (out == out[:, :1]).all()
    assert out.dtype == np.float32


@pytest.fixture
def watched() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("threads", [1, 2])
def test_no_weight_is_copied(threads: int, dtype: str, tmp_path: Path, watched: None) -> None:
    shape = spec(1024, 1024, 512)  # blocks of 3 MB in bf16
    store = pack_synthetic(shape, tmp_path / "store", dtype=dtype)
    arithmetic = Arithmetic(store, pool_of(store, [0, 1], 2), threads)
    arithmetic.prepare()
    one = work(arithmetic.inputs(hidden(store, 1)), [2])
    arithmetic.add(BlockRange(one, 0, [0]))
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    arithmetic.add(BlockRange(one, 1, [1]))
    assert tracemalloc.get_traced_memory()[1] - before < store.spec.block_bytes / 50
    arithmetic.close()


@pytest.mark.slow
@pytest.mark.skipif(machine() != "x86_64", reason="names of x86-64's processors")
@pytest.mark.parametrize("processor", ["generic", "haswell"])
def test_on_a_lesser_processor(processor: str) -> None:
    """Without AVX-512, and without FMA and conversions of halves: within the same bounds."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__,
         "-k", "(192-3 or 1088-3) and (double_precision or any_threads)"],
        env=os.environ | {"NUMBA_CPU_NAME": processor}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_compiled_code_does_not_outlive_what_it_was_compiled_with() -> None:
    """Numba asks whether kernels.py has changed, and of nothing else."""
    folder = Path(cpu_kernels.__file__).parent
    for name in (
        "activations.py",
        "chunks.py",
        "products.py",
        "signals.py",
        "vectors.py",
        "weights.py",
    ):
        line = f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16]}"
        assert line in (folder / "kernels.py").read_text("utf-8"), f"write it there: {line}"
