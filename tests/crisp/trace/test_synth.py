"""Synthetic traces: the statistics they are drawn from come back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from crisp.errors import CrispError
from crisp.trace import RoutingTrace
from crisp.trace.chains import PairChain, fit_chain, read_chains
from crisp.trace.synth import synthesize

ALL = np.array([(i, j) for i in range(4) for j in range(i + 1, 4)], np.int16)  # pairs of 4 experts
PAIRS = "layer,i,j,count,i_first\n0,0,1,60,20\n0,0,2,30,30\n0,1,2,10,0\n"
SHARES = "layer,zero,one,two\n0,0.0,0.4,0.6\n"


def example(seed: int = 0) -> PairChain:
    random = np.random.default_rng(seed)
    count = random.integers(5, 100, len(ALL))
    return fit_chain(ALL, count, random.integers(0, count), np.array([0.1, 0.5, 0.4]))


def common(a: np.ndarray, b: np.ndarray) -> int:
    return len(set(a.tolist()) & set(b.tolist()))


def test_a_chain_by_hand() -> None:
    # Three experts, all pairs equally frequent: any two different ones share one expert.
    pairs = np.array([(0, 1), (0, 2), (1, 2)], np.int16)
    chain = fit_chain(pairs, np.array([7, 7, 7]), np.array([7, 0, 0]), np.array([0, 0.4, 0.6]))
    np.testing.assert_allclose(chain.flow, np.eye(3) * 0.2 + (1 - np.eye(3)) * 0.4 / 6)
    np.testing.assert_allclose(chain.share, 1 / 3)
    np.testing.assert_allclose(chain.first, [1, 0, 0])


def test_a_chain_keeps_both_statistics() -> None:
    chain = example()
    np.testing.assert_allclose(chain.flow, chain.flow.T)
    np.testing.assert_allclose(chain.flow.sum(axis=1), chain.share, atol=1e-8)
    mass = np.zeros(3)
    for p, a in enumerate(ALL):
        for q, b in enumerate(ALL):
            mass[common(a, b)] += chain.flow[p, q]
    np.testing.assert_allclose(mass, [0.1, 0.5, 0.4], atol=1e-8)
    assert chain.miss < 1e-8


def test_independent_draws_are_kept_where_the_overlaps_are_those_of_chance() -> None:
    count = np.array([5, 9, 2, 7, 4, 8])
    share = count / count.sum()
    flow = np.outer(share, share)
    target = np.zeros(3)
    for p, a in enumerate(ALL):
        for q, b in enumerate(ALL):
            target[common(a, b)] += flow[p, q]
    np.testing.assert_allclose(fit_chain(ALL, count, count, target).flow, flow, atol=1e-9)


def test_what_cannot_be_is_said() -> None:
    # With three experts two tokens share at least one: a half that shares none cannot be.
    pairs = np.array([(0, 1), (0, 2), (1, 2)], np.int16)
    chain = fit_chain(pairs, np.array([6, 3, 1]), np.array([0, 0, 0]), np.array([0.5, 0.3, 0.2]))
    assert chain.miss == pytest.approx(0.5)
    np.testing.assert_allclose(chain.flow.sum(axis=1), [0.6, 0.3, 0.1], atol=1e-8)
    # A pair of nine tokens in ten must often follow itself.
    with pytest.raises(CrispError, match="no order of these pairs"):
        fit_chain(pairs, np.array([90, 6, 4]), np.array([0, 0, 0]), np.array([0.0, 1.0, 0.0]))


def check_statistics(trace: RoutingTrace, chains: dict[int, PairChain], targets: dict) -> int:
    """All shares within five standard errors; returns how many were checked.

    Sequences are drawn independently, each from the long run's shares. So the share in a sequence
    is an unbiased sample of the wanted one, whatever the dependence within the sequence, and the
    scatter between sequences gives the mean's standard error. A thousand shares within five errors
    are expected (Student's t with 199 degrees: about one in a million is outside); what is rarer
    than once in a few sequences is not normal, hence the allowance of a few counts.
    """
    _, starts, ends = trace.sequences()
    length = int(ends[0] - starts[0])
    experts = trace.experts.reshape(len(starts), length, trace.layers, 2)
    checked = 0

    def check(share: np.ndarray, wanted: float, tokens: int) -> None:
        nonlocal checked
        error = share.std(ddof=1) / np.sqrt(len(share))
        assert abs(share.mean() - wanted) < 5 * error + 5 / tokens
        checked += 1

    for layer, chain in chains.items():
        own = experts[:, :, layer]
        low, high = own.min(axis=2), own.max(axis=2)
        for (i, j), wanted, first in zip(chain.pairs, chain.share, chain.first, strict=True):
            hit = (low == i) & (high == j)
            check(hit.mean(axis=1), wanted, hit.size)
            check((hit & (own[..., 0] == i)).mean(axis=1), wanted * first, hit.size)
        shared = (own[:, :-1, :, None] == own[:, 1:, None, :]).sum(axis=(2, 3))
        for n, wanted in enumerate(targets[layer]):
            check((shared == n).mean(axis=1), wanted, shared.size)
    return checked


def test_the_statistics_come_back() -> None:
    chains = {0: example(0), 2: example(1)}
    trace = synthesize(chains, 20_000, 0, sequences=200)
    trace.validate("t")
    assert trace.moe_layers == (0, 2)
    targets = {layer: [0.1, 0.5, 0.4] for layer in chains}
    assert check_statistics(trace, chains, targets) == 2 * (6 * 2 + 3)


def test_mixtral_statistics_come_back(shared: Path) -> None:
    pairs = shared / "traces" / "mixtral-8x7b-pair-counts.csv"
    persistence = shared / "traces" / "mixtral-8x7b-persistence.csv"
    chains = read_chains(pairs, persistence)
    assert len(chains) == 32
    assert max(chain.miss for chain in chains.values()) < 1e-8
    lines = persistence.read_text().split("\n")[1:33]
    wanted = {int(line.split(",")[0]): [float(x) for x in line.split(",")[1:]] for line in lines}
    trace = synthesize(chains, 40_000, 1, sequences=200)
    assert check_statistics(trace, chains, wanted) == 32 * (28 * 2 + 3)


def test_the_same_seed_gives_the_same_tensors() -> None:
    chains = {0: example()}
    trace = synthesize(chains, 500, 7, sequences=3)
    assert synthesize(chains, 500, 7, sequences=3).digest() == trace.digest()
    assert synthesize(chains, 500, 8, sequences=3).digest() != trace.digest()
    header = trace.header
    assert (header.origin, header.seed, header.ordered, header.top_k) == ("synthetic", 7, True, 2)
    assert (trace.weights, trace.guess) == (None, None)


def test_draws_do_not_depend_on_how_they_are_grouped(monkeypatch) -> None:
    chains = {0: example(), 1: example(1)}
    digest = synthesize(chains, 500, 7, sequences=3).digest()
    monkeypatch.setattr("crisp.trace.synth._DRAW", 13)
    assert synthesize(chains, 500, 7, sequences=3).digest() == digest


def test_sequences_are_of_nearly_equal_length() -> None:
    trace = synthesize({0: example()}, 11, 0, sequences=3)
    _, starts, ends = trace.sequences()
    assert (ends - starts).tolist() == [4, 4, 3]
    assert (trace.phase == 1).all()
    trace.validate("t")


@pytest.mark.parametrize(
    ("tokens", "seed", "sequences", "message"),
    [
        (5, 0, 6, "6 sequences of 5 tokens; at least 1 token each"),
        (0, 0, 1, "1 sequences of 0 tokens"),
        (5, 0, 0, "0 sequences of 5 tokens"),
        (5, -1, 1, "seed -1 found"),
    ],
)
def test_bad_numbers(tokens: int, seed: int, sequences: int, message: str) -> None:
    with pytest.raises(CrispError, match=message):
        synthesize({0: example()}, tokens, seed, sequences=sequences)


def test_reading(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text(PAIRS + "0,1,3,0,0\n")  # never seen: never drawn
    (tmp_path / "shares.csv").write_text(SHARES)
    chains = read_chains(tmp_path / "pairs.csv", tmp_path / "shares.csv")
    assert chains[0].pairs.tolist() == [[0, 1], [0, 2], [1, 2]]
    np.testing.assert_allclose(chains[0].share, [0.6, 0.3, 0.1])
    np.testing.assert_allclose(chains[0].first, [1 / 3, 1, 0])


@pytest.mark.parametrize(
    ("pairs", "shares", "message"),
    [
        (None, SHARES, "pairs.csv: no such file"),
        ("layer,i,j,count\n0,0,1,2\n", SHARES, "pairs.csv: columns layer, i, j, count; expected"),
        (PAIRS + "0,2,1,3,0\n", SHARES, "pairs.csv: line 5: i is not below j"),
        (PAIRS + "0,1,3,3,4\n", SHARES, "pairs.csv: line 5: i_first is above count"),
        (PAIRS + "0,1,3,-3,0\n", SHARES, "pairs.csv: column count: expected whole numbers"),
        (PAIRS + "0,1,3,1.5,0\n", SHARES, "pairs.csv: column count: expected whole numbers"),
        (PAIRS + "0,1,40000,1,0\n", SHARES, "pairs.csv: line 5: an expert's number is too large"),
        (PAIRS + "0,0,1,1,0\n", SHARES, "pairs.csv: layer 0: a pair occurs twice"),
        (PAIRS + "1,0,1,0,0\n", SHARES + "1,0,0,1\n", "pairs.csv: layer 1: has no counts"),
        (PAIRS + "1,0,1,5,0\n", SHARES, "layer 1 is in one of them only"),
        (PAIRS, SHARES + "1,0,0,1\n", "layer 1 is in one of them only"),
        (PAIRS, SHARES + "0,0,0,1\n", "shares.csv: a layer occurs twice"),
        (PAIRS, "layer,a,b\n0,1,0\n", "shares.csv: expected the column layer and the shares"),
        (PAIRS, "layer,a,b,c\n0,.5,.5,.5\n", "shares.csv: line 2: three shares that sum to 1"),
        (PAIRS, "layer,a,b,c\n0,.5,-.5,1\n", "shares.csv: line 2: three shares that sum to 1"),
        (PAIRS, "layer,a,b,c\n0,x,.5,.5\n", "shares.csv: a share is not a number"),
        (PAIRS, "layer,a,b,c\n", "shares.csv: holds no rows"),
        (PAIRS, "layer,a,b,c\n0,1.0,0.0,0.0\n", "shares.csv: layer 0: no order of these pairs"),
    ],
)
def test_bad_files(tmp_path: Path, pairs: str | None, shares: str, message: str) -> None:
    if pairs is not None:
        (tmp_path / "pairs.csv").write_text(pairs)
    (tmp_path / "shares.csv").write_text(shares)
    with pytest.raises(CrispError) as caught:
        read_chains(tmp_path / "pairs.csv", tmp_path / "shares.csv")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
