"""What a sweep asks for: which cells, in which order, and what is wrong with a file."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path

import pytest

from crisp.errors import CrispError
from crisp.sim.sweep.spec import Sweep, read

BASE = 'trace = "t"\npolicy = "lru"\nbudget = "10%"\n'


def parsed(tmp_path: Path, text: str, **flags: list[str]) -> Sweep:
    path = tmp_path / "s.toml"
    path.write_text(text)
    return read(path, flags)


def test_a_grid_is_every_combination_the_last_key_fastest(tmp_path: Path) -> None:
    sweep = parsed(
        tmp_path,
        'budget = ["10%", 0.25]\nbits = [4.25, 16]\npolicy = ["lru", "fo"]\ntrace = "t"\nbatch = 2',
    )
    cells = list(sweep.cells())
    expected = [
        {"trace": "t", "bits": bits, "batch": "2", "policy": policy, "budget": budget}
        for bits, policy, budget in itertools.product(
            ["4.25", "16"], ["lru", "fo"], ["10%", "0.25"]
        )
    ]
    assert [dict(cell) for cell in cells] == expected
    assert sweep.count == len(expected)


def test_a_name_in_braces_takes_each_of_its_values(tmp_path: Path) -> None:
    sweep = parsed(
        tmp_path,
        BASE + 'width = "tiered(alpha={a},beta={b})"\n'
        "a = { from = 0.4, to = 0.6, step = 0.1 }\nb = [0.9, 1]",
    )
    assert [cell["width"] for cell in sweep.cells()] == [
        f"tiered(alpha={a},beta={b})" for a in ("0.4", "0.5", "0.6") for b in ("0.9", "1")
    ]
    assert next(sweep.cells())["a"] == "0.4"


def test_grids_are_run_one_after_the_other_and_share_what_stands_above(tmp_path: Path) -> None:
    sweep = parsed(
        tmp_path,
        'trace = "t"\nbudget = ["1%", "2%"]\na = [1, 2, 3]\n[[grid]]\npolicy = "lru"\n'
        '[[grid]]\npolicy = "crisp"\nwidth = "uniform({a})"\nbudget = "3%"\n',
    )
    assert [(cell["policy"], cell["budget"], cell.get("a")) for cell in sweep.cells()] == [
        ("lru", "1%", None),
        ("lru", "2%", None),
        ("crisp", "3%", "1"),
        ("crisp", "3%", "2"),
        ("crisp", "3%", "3"),
    ]


def test_flags_take_the_place_of_keys_and_do_without_a_file(tmp_path: Path) -> None:
    sweep = parsed(tmp_path, BASE, policy=["fo", "up"], limit=["9"])
    assert [(cell["policy"], cell["limit"]) for cell in sweep.cells()] == [("fo", "9"), ("up", "9")]
    alone = read(None, {"trace": ["t"], "policy": ["lru"], "budget": ["1%", "2%"]})
    assert alone.count == 2


def test_a_random_search_draws_from_every_grid_what_the_seed_says(tmp_path: Path) -> None:
    text = (
        BASE + "seed = { from = 0, to = 999, step = 1 }\n[search]\nrandom = 20\nseed = SEED\n"
        '[[grid]]\nphase = "decode"\n[[grid]]\nphase = "all"\nseed = [1, 2]\n'
    )
    sweep = parsed(tmp_path, text.replace("SEED", "5"))
    cells = list(sweep.cells())
    drawn = [int(cell["seed"]) for cell in cells if cell["phase"] == "decode"]
    assert len(drawn) == len(set(drawn)) == 20
    assert drawn == sorted(drawn)  # so that what is shared stays open
    assert [cell["seed"] for cell in cells if cell["phase"] == "all"] == ["1", "2"]
    assert sweep.count == len(cells) == 22
    assert cells == list(parsed(tmp_path, text.replace("SEED", "5")).cells())
    assert cells != list(parsed(tmp_path, text.replace("SEED", "6")).cells())


def test_a_million_million_cells_take_no_memory(tmp_path: Path) -> None:
    tenth = "{ from = 0, to = 1, step = 0.00001 }"
    text = BASE + f'width = "tiered({{a}},{{b}},{{c}})"\na = {tenth}\nb = {tenth}\nc = {tenth}\n'
    tracemalloc.start()
    sweep = parsed(tmp_path, text)
    assert sweep.count == 100_001**3
    assert sweep.grids[0].at(sweep.count - 1)["width"] == "tiered(1,1,1)"
    assert len(list(itertools.islice(sweep.cells(), 5))) == len(sweep.some(5)) == 5
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy = [", "s.toml: is not TOML"),
        (
            BASE + "polcy = 1",
            "s.toml: unknown key 'polcy'; did you mean 'policy'? known: trace, pr",
        ),
        (
            BASE + "[search]\nrandm = 3",
            "s.toml: search: unknown key 'randm'; did you mean 'random'",
        ),
        (BASE + "[search]\nrandom = 0", "s.toml: search: random: found 0, expected a whole number"),
        (
            BASE + "[search]\nseed = true",
            "s.toml: search: seed: found True, expected a whole numbe",
        ),
        (BASE + "grid = 3", "s.toml: grid: expected tables, each below a line [[grid]]"),
        (BASE + "[[grid]]\nwith = 1", "s.toml: grid 1: unknown key 'with'; did you mean 'width'?"),
        ('trace = "t"\npolicy = "lru"', "s.toml: lacks budget; give it in the file or as --budget"),
        (BASE + "width = []", "s.toml: width: is empty; at least one value was expected"),
        (BASE + "width = [true]", "s.toml: width: found True, expected text, a number, or a list"),
        (BASE + 'order = ["fifo", "fifo"]', "s.toml: order: fifo is given twice"),
        (
            BASE + 'width = "uniform({x})"',
            "s.toml: width: {x} has no values; give it some, x = [...]",
        ),
        (BASE + "limit = { from = 1, to = 2 }", "s.toml: limit: lacks step; a range is { from ="),
        (BASE + "limit = { form = 1 }", "s.toml: limit: unknown key 'form'; did you mean 'from'?"),
        (BASE + "limit = { from = 2, to = 1, step = 1 }", "s.toml: limit: expected a step above 0"),
        (
            BASE + 'limit = { from = "x", to = 1, step = 1 }',
            "s.toml: limit: from: 'x' is not a num",
        ),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_key(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(CrispError) as error:
        parsed(tmp_path, text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
