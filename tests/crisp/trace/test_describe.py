"""The facts of a trace: by hand, and from counts of a real model."""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from crisp.errors import CrispError
from crisp.policy.widths.base import Tiered
from crisp.profile import Profile, tiers
from crisp.trace import Header, RoutingTrace
from crisp.trace.describe import Description, describe, percent_of
from crisp.trace.plot import draw_combinations


def trace_of(experts: list | np.ndarray, n_experts: int, **changes) -> RoutingTrace:
    """Experts [rows, layers, k] as one decode-only sequence."""
    experts = np.asarray(experts, np.int16)
    rows, _, k = experts.shape
    tensors = {
        "sequence": np.zeros(rows, np.int32),
        "position": np.arange(rows, dtype=np.int32),
        "phase": np.ones(rows, np.uint8),
    }
    header = Header(n_experts=n_experts, top_k=k, ordered=True, origin="captured")
    return RoutingTrace(experts=experts, header=header, **(tensors | changes))


def facts_of(trace: RoutingTrace) -> Description:
    profile = Profile.from_trace(trace)
    tiering = Tiered()
    return describe(trace, profile, tiers(profile, tiering.alpha, tiering.beta), tiering)


def test_by_hand() -> None:
    # One layer, 4 experts: 6 possible pairs, counted 5, 3, 1, 1, 0, 0.
    tokens = [[0, 1]] * 5 + [[2, 1]] * 3 + [[2, 3], [3, 0]]
    facts = facts_of(trace_of([[token] for token in tokens], 4))
    assert facts.combinations == 6
    assert (facts.rows, facts.prefill, facts.decode, facts.sequences) == (10, 0, 10, 1)
    layer = facts.layers[0]
    assert layer.top == pytest.approx(0.8)  # 25 % of 6 pairs: 1.5, so 2
    assert layer.bottom == 0.0  # 29 %: 1.74, so 2
    # Experts 0 to 3 are used 6, 8, 4 and 2 times of 20.
    assert layer.experts == pytest.approx((0.4, 0.3, 0.2, 0.1))
    entropy = -sum(p * math.log2(p) for p in (0.4, 0.3, 0.2, 0.1))
    assert layer.entropy_bits == pytest.approx(entropy)
    assert facts.curve() == pytest.approx([0.4, 0.7, 0.9, 1])
    # Nine followers share 4 x 2, 1, 2 x 2, 1 and 1 experts with the token before: 15 of 18.
    assert layer.overlap == pytest.approx(15 / 18)
    # Of the nine, 5, 7, 4 and 2 are routed to experts 0 to 3: (25 + 49 + 16 + 4) / 81 of 2.
    assert layer.chance == pytest.approx((25 + 49 + 16 + 4) / 81 / 2)
    # Before each pair: 0, .5, .8, .9. So .6 and .9 make two of them HOT, one WARM, the rest COLD.
    assert layer.tier_activations == pytest.approx((0.8, 0.1, 0.1))
    assert layer.tier_combinations == pytest.approx((2 / 6, 1 / 6, 3 / 6))
    # Eq. 4: .8 x 2 + .1 x 1.5 + .1 x 1 = 1.85 experts of 2.
    assert layer.saving == pytest.approx(1 - 1.85 / 2)


def test_equation_4_for_more_than_two_experts() -> None:
    # The anchor with each of the others: (0,1) 6, (0,2) 3 and (0,3) 3 times.
    tokens = [[0, 1, 2]] * 3 + [[0, 1, 3]] * 3
    layer = facts_of(trace_of([[token] for token in tokens], 4)).layers[0]
    # Before each: 0, 6/12, 9/12: HOT, HOT, WARM.
    assert layer.tier_activations == pytest.approx((9 / 12, 3 / 12, 0))
    # 18 experts are read, 3 of them at half width.
    assert layer.saving == pytest.approx(1.5 / 18)


def test_absent_experts_and_dense_layers() -> None:
    tokens = [[0, 1], [1, -1], [2, -1], [2, 1]]
    facts = facts_of(trace_of([[[-1, -1], token] for token in tokens], 3))
    assert [layer.layer for layer in facts.layers] == [1]
    assert facts.n_layers == 2
    layer = facts.layers[0]
    assert layer.overlap == pytest.approx(2 / 4)  # the followers' 1 + 1 + 2 experts: 1 + 0 + 1
    assert layer.chance == pytest.approx(((2 / 3) ** 2 + (2 / 3) ** 2) / (4 / 3))
    assert layer.experts == pytest.approx((3 / 6, 2 / 6, 1 / 6))


def test_overlap_looks_only_at_decode_tokens_that_follow_one_another() -> None:
    tokens = [[[0, 1]], [[0, 1]], [[2, 3]], [[2, 0]], [[2, 0]]]
    changes = {
        "phase": np.array([0, 1, 1, 1, 1], np.uint8),
        "sequence": np.array([0, 0, 0, 1, 1], np.int32),
        "position": np.array([0, 1, 2, 0, 1], np.int32),
    }
    layer = facts_of(trace_of(tokens, 4, **changes)).layers[0]
    assert layer.overlap == pytest.approx(2 / 4)  # rows 1 to 2: none; rows 3 to 4: both
    alone = facts_of(trace_of(tokens, 4, phase=np.zeros(5, np.uint8))).layers[0]
    assert (alone.overlap, alone.chance) == (None, None)


def test_independent_tokens_overlap_as_chance_says() -> None:
    random = np.random.default_rng(0)
    scores = random.gumbel(size=(20_000, 2, 8)) + np.linspace(0, 2, 8)
    experts = np.argsort(-scores, axis=2)[..., :3]
    for layer in facts_of(trace_of(experts, 8)).layers:
        assert layer.overlap is not None
        # The mean of 20,000 numbers between 0 and 1: its deviation is below .5 / sqrt(20,000).
        assert layer.overlap == pytest.approx(layer.chance, abs=5 * 0.5 / math.sqrt(20_000))


def test_long_traces_are_looked_at_in_parts(monkeypatch) -> None:
    tokens = np.random.default_rng(0).permuted(np.tile(np.arange(6), (50, 3, 1)), axis=2)
    trace = trace_of(tokens[..., :2], 6)
    whole = facts_of(trace).to_dict()
    monkeypatch.setattr("crisp.trace.describe._STEP", 7)
    assert facts_of(trace).to_dict() == whole


def test_sequences(make) -> None:
    facts = facts_of(make(rows=14, sequences=4))  # 4, 4, 3 and 3 rows from position 7
    assert facts.sequences == 4
    assert (facts.lengths[0], facts.lengths[-1]) == (3, 4)
    assert facts.first_positions == (7, 7)
    assert (facts.prefill, facts.decode) == (8, 6)


def test_percent_of_counts_whole_things() -> None:
    assert [percent_of(25, 28), percent_of(29, 28), percent_of(29, 496)] == [7, 8, 144]
    assert [percent_of(25, 6), percent_of(25, 1)] == [2, 0]


def test_top_1_has_no_combinations(tmp_path: Path) -> None:
    trace = trace_of([[[0]], [[1]], [[1]]], 4)
    facts = facts_of(trace)
    layer = facts.layers[0]
    assert (layer.top, layer.bottom, layer.tier_activations, layer.saving) == (None,) * 4
    assert layer.overlap == pytest.approx(0.5)
    assert facts.mean("top") is None
    with pytest.raises(CrispError, match="top-1 routing has no combinations"):
        draw_combinations(tmp_path / "t.png", "t", facts, Profile.from_trace(trace))


def test_as_json(make) -> None:
    facts = facts_of(make(layers=2))
    read = json.loads(json.dumps(facts.to_dict(), allow_nan=False))
    assert read["header"]["n_experts"] == 8
    assert len(read["layers"]) == 2
    assert read["digest"] == make(layers=2).digest()
    assert read["tiers"] == {"alpha": 0.6, "beta": 0.9, "warm": 0.5}
    assert read["means"]["top"] == pytest.approx(facts.mean("top"))
    assert read["curve"][-1] == pytest.approx(1)


@pytest.mark.parametrize("n_experts", [8, 40])  # as bars; as an area
@pytest.mark.parametrize("end", [".png", ".svg", ".pdf"])
def test_pictures(make, tmp_path: Path, end: str, n_experts: int) -> None:
    trace = make(rows=60, n_experts=n_experts)
    path = tmp_path / f"t{end}"
    draw_combinations(path, "t", facts_of(trace), Profile.from_trace(trace))
    start = path.read_bytes()[:200]
    assert {".png": b"PNG", ".svg": b"<svg", ".pdf": b"%PDF"}[end] in start + path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


def test_the_tiers_are_those_asked_for() -> None:
    tokens = [[0, 1]] * 5 + [[2, 1]] * 3 + [[2, 3], [3, 0]]  # before each pair: 0, .5, .8, .9
    trace = trace_of([[token] for token in tokens], 4)
    profile = Profile.from_trace(trace)
    asked = Tiered(alpha=Fraction(2, 5), beta=Fraction(7, 10), warm=Fraction(1, 4))
    facts = describe(trace, profile, tiers(profile, asked.alpha, asked.beta), asked)
    assert facts.tiers == {"alpha": 0.4, "beta": 0.7, "warm": 0.25}
    # One HOT pair (5), one WARM (3), two COLD (2): 3 x 3/4 + 2 of 20 experts are spared.
    assert facts.layers[0].saving == pytest.approx((3 * 0.75 + 2) / 20)


def test_mixtral_pair_counts(shared: Path) -> None:
    """A trace with just these counts has the shares that the counts have."""
    table = pd.read_csv(shared / "traces" / "mixtral-8x7b-pair-counts.csv")
    tokens = int(table[table["layer"] == 0]["count"].sum())
    experts = np.empty((tokens, 32, 2), np.int16)
    top, bottom = [], []
    for layer, own in table.groupby("layer"):
        experts[:, layer] = np.repeat(own[["i", "j"]].to_numpy(), own["count"], axis=0)
        counts = own["count"].sort_values(ascending=False).tolist()
        assert len(counts) == 28
        top.append(sum(counts[:7]) / tokens)  # 25 % of 28 pairs are 7
        bottom.append(sum(counts[-8:]) / tokens)  # 29 % are 8.12
    facts = facts_of(trace_of(experts, 8))
    assert [layer.top for layer in facts.layers] == pytest.approx(top)
    assert [layer.bottom for layer in facts.layers] == pytest.approx(bottom)
    # What is written beside the table: 45 % (34 to 80 % by layer), and 12 %.
    assert facts.mean("top") == pytest.approx(0.45, abs=0.01)
    assert min(top) == pytest.approx(0.34, abs=0.01)
    assert max(top) == pytest.approx(0.80, abs=0.015)
    assert facts.mean("bottom") == pytest.approx(0.12, abs=0.01)


def test_counts_agree_with_a_plain_count(make) -> None:
    trace = make(rows=200, layers=2, k=2, n_experts=5)
    for layer in facts_of(trace).layers:
        pairs = Counter(tuple(sorted(row)) for row in trace.experts[:, layer.layer].tolist())
        counts = sorted(pairs.values(), reverse=True) + [0] * (10 - len(pairs))
        assert layer.top == pytest.approx(sum(counts[:3]) / 200)  # 2.5 of 10 pairs, so 3
        assert layer.bottom == pytest.approx(sum(counts[-3:]) / 200)
