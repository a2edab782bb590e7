"""The oracle against figures and timelines that were found without it."""

import ast
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.oracles import example, offline
from tests.oracles.straight import simulate, steps

MS = 1_000_000


def run(experts: Any, **options: Any) -> dict[str, Any]:
    """A small run: full widths, 10 ns a block to load, 10 to compute, no layer time."""
    experts = np.array(experts)
    settings: dict[str, Any] = {
        "sequence": np.zeros(len(experts), int),
        "n_experts": int(experts.max()) + 1,
        "n_blocks": 2,
        "load_ns": lambda blocks: 10 * blocks,
        "compute_ns": lambda first, last, row_widths: 10 * (last - first),
        "layer_ns": lambda layer, rows: 0,
    } | options
    settings.setdefault("widths", offline.widths_full(experts, settings["n_blocks"]))
    return simulate(experts, **settings)


def test_the_oracles_are_independent() -> None:
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"crisp", "sim", "hw"}, path


# ---------------------------------------------------------------------------- the real trace


@pytest.fixture(scope="module")
def real(shared: Path) -> dict[str, np.ndarray]:
    """gpt-oss-20b: 24 layers, 32 experts, top-4; `n` first rows after the profile's sequences."""
    table = pd.read_parquet(shared / "traces" / "gpt-oss-20b__mmlu-gpqa-mix.parquet")
    table = table.sort_values(["sequence", "token", "layer"])
    experts = table[["e0", "e1", "e2", "e3"]].to_numpy(np.int64).reshape(-1, 24, 4)
    sequence = table["sequence"].to_numpy().reshape(-1, 24)[:, 0]
    profile, rest = offline.split(sequence)
    assert len(set(sequence[profile])) == 47
    rest = rest[:3000]
    tier = offline.tiers(offline.pair_counts(experts[profile], 32))
    half = offline.blocks_of(Fraction(1, 2), 2880, 368)
    assert half == 4
    return {
        "experts": experts[rest],
        "sequence": sequence[rest],
        "full": offline.widths_full(experts[rest], 8),
        "half": offline.widths_full(experts[rest], half),
        "tiered": offline.widths_tiered(experts[rest], 8, tier, half),
    }


def test_tiers_of_the_real_trace(real: dict[str, np.ndarray]) -> None:
    others = real["tiered"][:, :, 1:]
    assert [int((others == width).sum()) for width in (8, 4, 0)] == [131822, 63068, 21110]
    assert (real["tiered"][:, :, 0] == 8).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "order", "cache", "budget", "total_ns", "hits", "partial", "blocks"),
    [
        ("full", "sequential", "none", "0", 2030400000000, 0, 0, 2304000),
        ("full", "fifo", "lru", "1/10", 1143739700000, 108314, 0, 1437488),
        ("full", "fifo", "lru", "1/2", 498852900000, 257472, 0, 244224),
        ("half", "fifo", "lru", "1/5", 302701600000, 238427, 0, 198292),
        ("tiered", "widest", "lru", "1/10", 909256600000, 102373, 4800, 1124984),
        ("tiered", "widest", "lru", "3/10", 521945600000, 201206, 5632, 425092),
    ],
)
def test_known_figures(
    real: dict[str, np.ndarray],
    widths: str,
    order: str,
    cache: str,
    budget: str,
    total_ns: int,
    hits: int,
    partial: int,
    blocks: int,
) -> None:
    """Figures of three separate re-computations; costs of the paper's Table 1."""
    result = simulate(
        real["experts"],
        sequence=real["sequence"],
        n_experts=32,
        n_blocks=8,
        widths=real[widths],
        order=order,
        cache=cache,
        share=Fraction(budget),
        log=False,
        **offline.table_costs(56 * MS // 10, 13 * MS // 10, 6 * MS // 10, 8),
    )
    assert result["tasks"] + result["skipped"] == 288000
    assert result["skipped"] == (21110 if widths == "tiered" else 0)
    found = tuple(result[name] for name in ("total_ns", "hits", "partial", "blocks_loaded"))
    assert found == (total_ns, hits, partial, blocks)


# ---------------------------------------------------------------------------- the worked example


@pytest.mark.parametrize("variant", example.tables(), ids="-".join)
def test_worked_example(variant: tuple[str, str, str, str]) -> None:
    toy, table = example.toy(), example.tables()[variant]
    order, unit, granularity, prefetch = variant
    load, compute = toy["load_ns"], toy["compute_ns"]
    result = simulate(
        np.array(toy["experts"]),
        sequence=np.array(toy["sequence"]),
        n_experts=toy["n_experts"],
        n_blocks=toy["n_blocks"],
        widths=np.array(toy["widths"]),
        load_ns=lambda blocks: load["request"] + blocks * load["block"],
        compute_ns=lambda first, last, row_widths: (
            compute["launch"] + (last - first) * compute["block"]
        ),
        layer_ns=lambda layer, rows: toy["layer_ns"],
        order=order,
        cache=toy["cache"],
        share=Fraction(toy["budget"].rstrip("%")) / 100,
        scope=toy["scope"],
        unit=unit,
        granularity=granularity,
        prefetch=prefetch,
    )
    streams = [("link", entry) for entry in result["link"]]
    streams += [("compute", entry) for entry in result["compute"]]
    # (kind, event, layer, expert, first, blocks, start, end) without kind and layer
    found = [(stream, entry[1], *entry[3:]) for stream, entry in streams]
    assert sorted(found, key=lambda a: (a[5], a[0])) == table["activities"]
    for name in ("total_ns", "hits", "partial", "blocks_loaded"):
        assert result[name] == table[name], name
    assert result["skipped"] == 1
    for event, kept in zip(result["log"], table["kept"], strict=True):
        layer = event["layer"]
        assert {key[1]: n for key, n in event["resident"].items() if key[0] == layer} == kept


def test_worked_example_has_every_variant() -> None:
    variants = set(example.tables())
    for order in ("sequential", "fifo", "widest", "johnson"):
        for unit in ("expert", "block"):
            for granularity in ("expert", "block"):
                assert (order, unit, granularity, "none") in variants
    timelines = [table["activities"] for table in example.tables().values()]
    assert all(a != b for n, a in enumerate(timelines) for b in timelines[:n])


# ---------------------------------------------------------------------------- before a run


def test_split_takes_whole_sequences_or_half_the_rows_of_one() -> None:
    profile, rest = offline.split(np.array([3, 3, 5, 5, 9]))
    assert (profile.tolist(), rest.tolist()) == ([0, 1], [2, 3, 4])
    profile, rest = offline.split(np.array([3, 3, 3]))
    assert (profile.tolist(), rest.tolist()) == ([0], [1, 2])


def test_tiers_follow_the_share_before() -> None:
    pairs = np.zeros((1, 4, 4), int)
    pairs[0, 0, 1], pairs[0, 0, 2], pairs[0, 1, 2], pairs[0, 2, 3] = 6, 2, 1, 1
    tier = offline.tiers(pairs)[0]
    # shares before: 0, exactly .6, .8 and exactly .9; (1, 2) ties with (2, 3) and comes first
    assert [tier[0, 1], tier[2, 0], tier[1, 2], tier[2, 3], tier[1, 3]] == [0, 1, 1, 2, 2]


def test_anchor_is_the_first_or_the_most_frequent() -> None:
    experts = np.array([[[2, 0, 1]], [[1, 0, 2]], [[1, 2, -1]]])
    assert np.argwhere(offline.pair_counts(experts, 3)[0]).tolist() == [[0, 1], [0, 2], [1, 2]]
    counts = offline.expert_counts(experts, 3)
    assert counts.tolist() == [[2, 3, 3]]
    # unordered: expert 1 (as frequent as 2, but lower) is the anchor of every row
    assert offline.pair_counts(experts, 3, ordered=False)[0].tolist() == [
        [0, 2, 0],
        [0, 0, 3],
        [0, 0, 0],
    ]
    assert offline.widths_single(experts, 8)[:, 0].tolist() == [[8, 0, 0], [8, 0, 0], [8, 0, 0]]
    assert offline.widths_single(experts, 8, counts)[:, 0, :].tolist() == [
        [0, 0, 8],
        [8, 0, 0],
        [8, 0, 0],
    ]


def test_capacity_goes_to_the_first_layers() -> None:
    share = Fraction(3, 10)  # of 3 layers x 8 experts x 4 blocks
    assert offline.capacities(share, 3, 8, 4, "layer", "expert") == [12, 8, 8]
    assert offline.capacities(share, 3, 8, 4, "layer", "block") == [10, 9, 9]
    assert offline.capacities(share, 3, 8, 4, "global", "expert") == [28]
    assert offline.capacities(share, 3, 8, 4, "global", "block") == [28]


def test_static_set_is_the_most_frequent() -> None:
    counts = np.array([[5, 9, 5], [1, 0, 7]])
    share = Fraction(1, 2)  # 3 of 6 experts, 6 of 12 blocks
    found = offline.static_set(counts, [0, 1], share, 2, "layer", "expert")
    assert found == {(0, 1): 2, (0, 0): 2, (1, 2): 2}
    found = offline.static_set(counts, [0, 1], share, 2, "layer", "block")
    assert found == {(0, 1): 2, (0, 0): 1, (1, 2): 2, (1, 0): 1}
    found = offline.static_set(counts, [0, 1], share, 2, "global", "block")
    assert found == {(0, 1): 2, (1, 2): 2, (0, 0): 2}


# ---------------------------------------------------------------------------- steps


def test_decode_slots_take_the_next_sequence() -> None:
    # rows 0-2, 3, 4-5, 6 of four sequences
    assert steps(np.array([0, 0, 0, 1, 2, 2, 3]), None, batch=2) == [[0, 3], [1, 4], [2, 5], [6]]
    assert steps(np.array([0, 1, 1, 2]), None, batch=2) == [[0, 1], [3, 2]]


def test_prompts_go_in_chunks_before_decoding() -> None:
    sequence = np.array([0, 0, 0, 0, 1, 1, 1])
    phase = np.array([0, 0, 0, 1, 0, 1, 1])
    assert steps(sequence, phase, batch=1, chunk=2) == [[0, 1], [2], [3], [4], [5], [6]]
    assert steps(sequence, phase, batch=2, chunk=2) == [[0, 1], [2], [4], [3, 5], [6]]


def test_rows_of_a_step_share_a_load() -> None:
    rows: list[list[int]] = []

    def compute_ns(first: int, last: int, row_widths: list[int]) -> int:
        rows.append(row_widths)
        return 10

    result = run(
        [[[0, 1]], [[1, 2]]],
        sequence=np.array([0, 1]),
        widths=np.array([[[2, 0]], [[1, 0]]]),
        batch=2,
        cache="none",
        compute_ns=compute_ns,
    )
    assert result["log"][0]["tasks"] == [(0, 2, 0), (1, 1, 0)]
    assert rows == [[2], [1]]
    # expert 1 is a task (of the second row), expert 2 of nobody
    assert (result["skipped"], result["skipped_entries"]) == (1, 2)
    result = run(
        [[[0]], [[0]]], sequence=np.array([0, 1]), widths=np.array([[[1]], [[2]]]), batch=2
    )
    assert (result["tasks"], result["blocks_loaded"]) == (1, 2)


# ---------------------------------------------------------------------------- the run


def test_a_transient_load_waits_for_staging() -> None:
    slow: Callable[..., int] = lambda first, last, row_widths: 50 * (last - first)  # noqa: E731
    result = run([[[0, 1, 2]]], cache="none", compute_ns=slow)
    # 4 blocks fit; the third expert waits until the first has been computed (20 + 100)
    assert [entry[-2:] for entry in result["link"]] == [(0, 20), (20, 40), (120, 140)]
    assert result["total_ns"] == 320
    result = run([[[0, 1, 2]]], cache="none", compute_ns=slow, granularity="block")
    # the first expert's blocks are computed at 60 and 110; both are needed
    assert [entry[-2] for entry in result["link"]] == [0, 10, 20, 30, 110, 120]
    assert result["total_ns"] == 310


def test_victims() -> None:
    # one layer, room for 2 of 4 experts; 0 twice, then 1, then 2, 3 come
    trace = [[[0]], [[0]], [[1]], [[2]], [[3]]]
    lru = run(trace, cache="lru", share=Fraction(1, 2))
    lfu = run(trace, cache="lfu", share=Fraction(1, 2))
    assert sorted(lru["log"][-1]["resident"]) == [(0, 2), (0, 3)]
    assert sorted(lfu["log"][-1]["resident"]) == [(0, 0), (0, 3)]
    victims = [load["victims"] for event in lfu["log"] for load in event["loads"]]
    assert victims == [[], [], [(0, 1, 2)], [(0, 2, 2)]]


def test_lfu_ties_go_to_the_least_recent_and_tasks_are_protected() -> None:
    # room for 2 of 4: 1, then 0 once each; 2 evicts the older 1
    result = run([[[1]], [[0]], [[2]], [[3]]], cache="lfu", share=Fraction(1, 2))
    victims = [load["victims"] for event in result["log"] for load in event["loads"]]
    assert victims == [[], [], [(0, 1, 2)], [(0, 0, 2)]]
    # 0 twice, then 1 and 2 together: 1 is the rarest, but a task of the event
    trace = [[[0, -1]], [[0, -1]], [[1, 2]], [[3, -1]]]
    result = run(trace, cache="lfu", share=Fraction(1, 2))
    victims = [load["victims"] for event in result["log"] for load in event["loads"]]
    assert victims == [[], [], [(0, 0, 2)], [(0, 1, 2)]]


def test_a_victim_gives_up_just_what_is_needed() -> None:
    # one layer, room for 3 of 4 blocks; each expert in turn misses one block
    result = run([[[0]], [[1]], [[0]]], unit="block", share=Fraction(3, 4))
    kept = [event["resident"] for event in result["log"]]
    assert kept == [{(0, 0): 2}, {(0, 0): 1, (0, 1): 2}, {(0, 0): 2, (0, 1): 1}]
    assert (result["partial"], result["blocks_loaded"]) == (1, 5)


def test_johnson_load_equal_to_computation_is_late() -> None:
    # load = computation for both: by computation, longest first
    result = run([[[0, 1]]], widths=np.array([[[1, 2]]]), order="johnson", share=Fraction(1))
    assert result["log"][0]["order"] == [1, 0]


def test_global_scope_evicts_across_layers() -> None:
    trace = [[[0], [0]], [[1], [0]]]
    result = run(trace, share=Fraction(1, 2), scope="global")  # 2 of 4 experts
    assert result["log"][-1]["resident"] == {(0, 1): 2, (1, 0): 2}
    assert result["hits"] == 1
    result = run(trace, share=Fraction(1, 4), scope="global")  # one: what comes next evicts it
    assert (result["hits"], result["blocks_loaded"]) == (0, 8)


def test_static_never_changes() -> None:
    result = run([[[0]], [[1]]], cache="static", static={(0, 1): 1}, share=Fraction(1, 4))
    assert (result["hits"], result["partial"], result["blocks_loaded"]) == (0, 1, 3)
    assert result["log"][-1]["resident"] == {(0, 1): 1}


def test_layers_without_experts_take_time() -> None:
    trace = [[[-1], [0], [-1]], [[-1], [0], [-1]]]
    result = run(trace, share=Fraction(1), layer_ns=lambda layer, rows: 100 + layer)
    assert result["events"] == 2
    assert result["total_ns"] == 2 * (100 + 101 + 102) + 20 + 20 + 20


def test_guess_hides_loads() -> None:
    # layer 1's expert is known while layer 0 computes 100 ns; its event starts at 120
    result = run(
        [[[0], [1]]],
        guess=np.array([[[-1], [1]]]),
        prefetch="guess",
        share=Fraction(1),
        compute_ns=lambda first, last, row_widths: 100,
    )
    assert result["link"] == [
        ("load", 0, 0, 0, 0, 2, 0, 20),
        ("prefetch", 1, 1, 1, 0, 1, 20, 30),
        ("prefetch", 1, 1, 1, 1, 1, 30, 40),
    ]
    assert (result["hits"], result["total_ns"]) == (1, 220)
    # nothing can be kept: the prefetch staging serves the same
    staged = run(
        [[[0], [1]]],
        guess=np.array([[[-1], [1]]]),
        prefetch="guess",
        cache="none",
        compute_ns=lambda first, last, row_widths: 100,
    )
    assert staged["link"] == result["link"]
    assert (staged["hits"], staged["total_ns"]) == (1, 220)


def test_prefetch_staging_holds_one_expert() -> None:
    guess = np.array([[[-1, -1], [1, 2]]])
    options = {"prefetch": "guess", "guess": guess, "cache": "none"}
    trace = [[[0, -1], [2, -1]]]
    result = run(trace, compute_ns=lambda first, last, row_widths: 100, **options)
    # expert 1 fills it; expert 2 is loaded when it is asked for, at 120
    assert [entry[0] for entry in result["link"]] == ["load", "prefetch", "prefetch", "load"]
    assert result["link"][-1][-2:] == (120, 140)


def test_what_follows_a_staged_block_is_transient() -> None:
    # a room of one expert in layer 1 goes to the wrong guess, expert 1; one block of expert 2 is
    # staged when its event starts (at 50), and the other one does not evict expert 1
    result = run(
        [[[0, -1], [2, -1]]],
        guess=np.array([[[-1, -1], [1, 2]]]),
        prefetch="guess",
        share=Fraction(1, 3),
        compute_ns=lambda first, last, row_widths: 30,
    )
    assert [(entry[3], entry[4]) for entry in result["link"][1:]] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert result["log"][1]["tasks"] == [(2, 2, 1)]
    assert result["log"][1]["loads"] == [
        {"expert": 2, "first": 1, "blocks": 1, "kept": 0, "victims": []}
    ]
    assert result["log"][1]["resident"] == {(0, 0): 2, (1, 1): 2}


def test_johnson_is_the_best_order() -> None:
    rng = np.random.default_rng(1)
    for _ in range(60):
        widths = rng.integers(1, 5, (1, 1, 5))
        loads = [0, *np.cumsum(rng.integers(1, 30, 4)).tolist()]
        computes = [0, *np.cumsum(rng.integers(1, 30, 4)).tolist()]
        options = {
            "widths": widths,
            "n_blocks": 4,
            "share": Fraction(1),
            "load_ns": loads.__getitem__,
            "compute_ns": lambda first, last, row_widths, c=computes: c[last] - c[first],
        }
        trace = [[list(range(5))]]
        best = min(
            run(trace, order="random", ranking=lambda event, e, p=p: list(p), **options)["total_ns"]
            for p in permutations(range(5))
        )
        assert run(trace, order="johnson", **options)["total_ns"] == best


def random_case(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    rows, layers, n_experts, k = 12, int(rng.integers(1, 4)), 6, 3
    draw = [[rng.permutation(n_experts)[:k] for _ in range(layers)] for _ in range(rows)]
    guess = [[rng.permutation(n_experts)[:k] for _ in range(layers)] for _ in range(rows)]
    return {
        "experts": np.array(draw),
        "guess": np.array(guess),
        "sequence": np.repeat([0, 1, 2], rows // 3),
        "widths": rng.integers(0, 5, (rows, layers, k)),
        "n_experts": n_experts,
        "n_blocks": 4,
        "share": Fraction(int(rng.integers(0, 20)), 20),
        "cache": str(rng.choice(["none", "lru", "lfu"])),
        "scope": str(rng.choice(["layer", "global"])),
        "unit": str(rng.choice(["expert", "block"])),
        "granularity": str(rng.choice(["expert", "block"])),
        "order": str(rng.choice(["fifo", "widest"])),
        "batch": int(rng.integers(1, 4)),
    }


def costs(seed: int) -> dict[str, Any]:
    a, b, c, d = np.random.default_rng(seed).integers(1, 40, 4).tolist()
    return {
        "load_ns": lambda blocks: a + b * blocks,
        "compute_ns": lambda first, last, row_widths: c * (last - first) + len(row_widths),
        "layer_ns": lambda layer, rows: d,
    }


@pytest.mark.parametrize("seed", range(40))
def test_without_prefetch_timing_decides_nothing(seed: int) -> None:
    case = random_case(seed)
    slow, fast = (simulate(**case, **costs(100 * seed + n)) for n in (1, 2))
    for name in ("hits", "partial", "blocks_loaded", "tasks", "skipped"):
        assert slow[name] == fast[name]
    for one, other in zip(slow["log"], fast["log"], strict=True):
        for name in ("loads", "resident", "order", "tasks"):
            assert one[name] == other[name]


@pytest.mark.parametrize("prefetch", ["previous", "guess"])
@pytest.mark.parametrize("seed", range(40))
def test_streams_do_one_thing_at_a_time(seed: int, prefetch: str) -> None:
    case = random_case(seed)
    result = simulate(**case, **costs(seed), prefetch=prefetch)
    assert result["blocks_prefetched"] > 0 or (case["experts"].shape[1], prefetch) == (1, "guess")
    for stream in ("link", "compute"):
        entries = result[stream]
        assert all(a[-1] <= b[-2] for a, b in pairwise(entries))
    loaded = {
        kind: sum(e[5] for e in result["link"] if e[0] == kind) for kind in ("load", "prefetch")
    }
    assert loaded["prefetch"] == result["blocks_prefetched"]
    assert sum(loaded.values()) == result["blocks_loaded"]
    asked = sum(width for event in result["log"] for _, width, _ in event["tasks"])
    assert sum(entry[5] for entry in result["compute"] if entry[0] == "task") == asked
    for event in result["log"]:
        total = sum(event["resident"].values())
        layers = case["experts"].shape[1]
        room = offline.capacities(case["share"], layers, 6, 4, case["scope"], case["unit"])
        assert total <= sum(room)
