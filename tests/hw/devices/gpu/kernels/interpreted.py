"""The kernels in Triton's interpreter: for test_kernels.py to run, in a process of its own.

Interpreting is decided for a whole process when triton is imported. So nothing here imports it as
the module is imported, which pytest does in any process to look for doctests.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from crisp.hw.devices.gpu.kernels import add_blocks, jitted
from crisp.hw.devices.gpu.kernels.launch import TABLE
from crisp.hw.devices.gpu.kernels.layout import BlockLayout
from tests.hw.devices.gpu.kernels.bfloat16 import mend
from tests.hw.devices.gpu.kernels.cases import Case, check, piece

KINDS = [(dtype, dtype) for dtype in ("fp32", "fp16", "bf16")] + [
    ("int8", "bf16"),
    ("int4", "bf16"),
]

# Widths of 16, of 48, and all of 8 blocks but one, which are 16 neurons each but for a last of 5.
# Fewer and fewer rows use a block.
ONE, THREE, SEVEN = (16,), (16, 16, 16), (16,) * 6 + (5,)
COUNTS = {1: (1,) * 7, 3: (3, 2, 2, 1, 1, 1, 1), 17: (17, 16, 9, 9, 4, 1, 1)}


def case(kind: tuple[str, str], d: int, neurons: tuple[int, ...], rows: int, **more: Any) -> Case:
    return Case(*kind, d, 16, neurons, COUNTS[rows][: len(neurons)], rows, **more)


CASES = [
    case(kind, d, neurons, rows)
    for kind in KINDS
    for narrow in (80 if kind[0] == kind[1] else 128,)
    for d, neurons, rows in (
        (narrow, SEVEN, 1), (192, THREE, 1), (192, ONE, 3), (narrow, THREE, 3), (192, SEVEN, 17),
    )
]  # fmt: skip
CASES += [
    case(kind, 192, THREE, rows, activation=activation)
    for kind in (("bf16", "bf16"), ("fp32", "fp32"), ("int4", "bf16"))
    for activation in ("gelu", "gpt_oss")
    for rows in (1, 3)
]
CASES += [  # every other activation, with a gate and, where it takes one number, without
    case(("fp32", "fp32"), 80, (16, 5), rows, activation=activation, matrices=matrices)
    for activation, matrices in (
        ("gelu_tanh", 3), ("relu", 3), ("relu2", 3), ("clamped_silu(0.5)", 3),
        ("silu_clamped(0.5)", 3), ("softcapped_silu(4,2)", 3), ("gpt_oss(1.3,0.5)", 3),
        ("silu", 2), ("gelu", 2), ("gelu_tanh", 2), ("relu", 2), ("relu2", 2),
    )
    for rows in (1, 3)
]  # fmt: skip
CASES += [
    case(kind, 192, THREE, rows, activation="relu2", matrices=2)
    for kind in (("bf16", "bf16"), ("int8", "bf16"), ("int4", "bf16"))
    for rows in (1, 3)
]
CASES += [
    Case("bf16", "bf16", 192, 80, (80, 80, 67), (70, 66, 1), 70),  # more than a tile of everything
    Case("fp16", "fp16", 192, 304, (304, 272), (1, 1), 1),
    Case("int8", "bf16", 640, 80, (80, 67), (1, 1), 1),
    Case("bf16", "fp32", 80, 16, (16, 9), (3, 2), 3),  # neither type holds the other's numbers
    Case("bf16", "fp16", 80, 16, (16, 9), (3, 2), 3),
    Case("fp32", "bf16", 80, 16, (16, 9), (1, 1), 1),
    Case("int8", "fp16", 192, 16, (16, 9), (3, 2), 3),
    Case("int4", "fp16", 192, 16, (16, 9), (3, 2), 3),
    Case("int4", "fp32", 128, 16, (16, 9), (3, 2), 3),
    Case("bf16", "bf16", 80, 24, (24, 10), (5, 2), 7),  # rows that no block uses; 24 neurons
    Case("bf16", "bf16", 80, 16, (16, 16), (1, 0), 1),  # a block that no row uses
]


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> None:
    assert jitted(torch.zeros(1)), "to be run with TRITON_INTERPRET=1"
    mend()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_piece_is_right_and_touches_nothing_else(case: Case) -> None:
    """And blocks that come one by one give the same bits."""
    given = piece(case)
    together = check(given, add_blocks)

    def one_by_one(layout: BlockLayout, pool: Any, *rest: Any) -> None:
        *table, x, sums, hidden = rest
        for i in range(len(case.neurons)):
            add_blocks(layout, pool, *(t[i : i + 1] for t in table), x, sums, hidden)

    assert torch.equal(check(given, one_by_one), together)


@pytest.mark.parametrize("arch", TABLE)
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_however_a_card_wants_it(arch: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from crisp.hw.devices.gpu.kernels import calls

    monkeypatch.setattr(calls, "INTERPRETED", arch)
    for kind in (("bf16", "bf16"), ("int4", "bf16")):
        check(piece(case(kind, 192, THREE, rows)), add_blocks)


@pytest.mark.parametrize("rows", [1, 2])
def test_slots_may_lie_beyond_two_gibibytes(rows: int) -> None:
    """Of which only the pages of one slot are ever touched."""
    given = piece(Case("int8", "bf16", 128, 16, (16,), (rows,), rows))
    stride = given.case.layout.stride
    far = (1 << 31) // stride + 1
    pool = torch.empty(far + 1, stride, dtype=torch.uint8)
    pool[far] = given.pool[given.table[0][0]]
    slots = torch.tensor([far], dtype=torch.int32)

    def there(layout: BlockLayout, _: Any, __: Any, *rest: Any) -> None:
        add_blocks(layout, pool, slots, *rest)

    check(given, there)


def test_room_between_the_kernels_is_found_where_none_is_given() -> None:
    def without(*all_but: Any) -> None:
        add_blocks(*all_but[:-1])

    check(piece(case(("bf16", "bf16"), 80, THREE, 3)), without)


def test_what_is_no_number_is_passed_on_to_rows_that_use_it() -> None:
    given = piece(case(("bf16", "bf16"), 80, THREE, 3))
    second = given.pool[given.table[0][1]].view(torch.bfloat16)
    second[2 * 16 * 80 + 5] = math.nan  # in its down projection; its rows are two of three
    sums = given.before.clone()
    add_blocks(given.case.layout, given.pool, *given.table, given.x, sums)
    assert sums.isnan().nonzero().tolist() == [[0, 5], [1, 5]]


@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_no_number_in_x_is_passed_on(rows: int) -> None:
    """By the clamped activation too, to the row that it is in and to no other."""
    given = piece(case(("bf16", "bf16"), 80, ONE, rows, activation="gpt_oss"))
    given.x[0, 3] = math.nan
    sums = given.before.clone()
    add_blocks(given.case.layout, given.pool, *given.table, given.x, sums)
    assert sums[0].isnan().all() and not sums[1:].isnan().any()


MISTAKES = {
    "a missing mask": [("inside = (n < width)[:, None]", "inside = (n < BLOCK)[:, None]")],
    "a wrong slot": [("tl.load(slots + b)", "tl.load(slots)")],
    "a dropped tail of columns": [("tl.range(0, D,", "tl.range(0, D // COLUMNS * COLUMNS,")],
    "a dropped tail of neurons": [("tl.range(0, width,", "tl.range(0, width // 16 * 16,")],
    "a wrong stride": [("slot * STRIDE", "slot * (3 * BLOCK * D * BITS // max(8, BITS))")],
    "gate and up swapped": [
        ("tl.sum(gates, 1), tl.sum(ups, 1)", "tl.sum(ups, 1), tl.sum(gates, 1)"),
        ("        gates, ups, halves,", "        ups, gates, halves,"),
    ],
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("kind", "d"), [(("fp32", "fp32"), 80), (("int4", "bf16"), 192)])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(
    mistake: str, kind: tuple[str, str], d: int, rows: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the check above, which the same kernels pass as they are."""
    from crisp.hw.devices.gpu.kernels import blocks, calls

    source = Path(blocks.__file__).read_text()
    for right, wrong in MISTAKES[mistake]:
        assert right in source
        source = source.replace(right, wrong)
    path = tmp_path / "mistaken.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mistaken", path)
    assert spec is not None and spec.loader is not None
    mistaken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mistaken)

    given = piece(replace(case(kind, d, THREE, rows), neurons=(16, 16, 5)))
    check(given, add_blocks)
    monkeypatch.setattr(calls, "blocks", mistaken)
    with pytest.raises(AssertionError, match="off by"):
        check(given, add_blocks)
