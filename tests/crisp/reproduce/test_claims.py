"""The paper's figures as data, and the rules by which they are judged."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from crisp.reproduce import arithmetic
from crisp.reproduce.arithmetic import PaperCosts
from crisp.reproduce.claims import BASES, HARDWARE, MODEL, PAPER, TRACE, Claim, claims
from crisp.reproduce.findings.answers import ANSWERS
from crisp.reproduce.measured import quality_figures
from crisp.reproduce.verdict import (
    AGREES,
    DIFFERS,
    NEEDS_HARDWARE,
    NEEDS_MODEL,
    NOT_FOLLOWING,
    Finding,
    PartFigures,
    judge,
)
from crisp.reproduce.words import count_verdicts, format_verdict


def claim(by: str = TRACE, relation: str = "equal", **values: float) -> Claim:
    return Claim("X", "Figure 0", "", "", "ms", by, values or {"a": 10.0}, relation=relation)


@pytest.mark.parametrize(
    ("own", "found", "verdict"),
    [
        (claim(), PartFigures(ours=10.9), AGREES),
        (claim(), PartFigures(ours=11.1), DIFFERS),
        (claim(), PartFigures(ours=10, most=9.1), AGREES),  # a bound within the tolerance
        (claim(), PartFigures(ours=10, most=8.9), NOT_FOLLOWING),
        (claim(), PartFigures(ours=10, least=11.1), NOT_FOLLOWING),
        (
            claim(),
            PartFigures(ours=10, elsewhere=12),
            NOT_FOLLOWING,
        ),  # the paper contradicts itself
        (claim(PAPER), PartFigures(elsewhere=10.5), AGREES),
        (claim(PAPER), PartFigures(ours=99, elsewhere=10.5), AGREES),  # ours decides nothing here
        (claim(HARDWARE), PartFigures(ours=10), NEEDS_HARDWARE),
        (claim(HARDWARE), PartFigures(most=5), NOT_FOLLOWING),
        (claim(MODEL), PartFigures(), NEEDS_MODEL),
        (claim(MODEL), PartFigures(elsewhere=20), NOT_FOLLOWING),
        (claim(relation="at least"), PartFigures(ours=50), AGREES),
        (claim(relation="at least"), PartFigures(ours=8.9), DIFFERS),
        (claim(relation="at most"), PartFigures(ours=1), AGREES),
        (claim(relation="at most"), PartFigures(ours=12), DIFFERS),
        (claim(relation="more than"), PartFigures(ours=11.1), AGREES),
        (claim(relation="more than"), PartFigures(ours=10.5), DIFFERS),
    ],
)
def test_rules(own: Claim, found: PartFigures, verdict: str) -> None:
    assert judge(own, "a", found) == verdict


def test_the_gravest_part_decides_and_is_named() -> None:
    own = claim(a=10.0, b=10.0, c=10.0)
    finding = Finding(
        own, {"a": PartFigures(10), "b": PartFigures(20), "c": PartFigures(10, most=5)}, ""
    )
    assert finding.verdict == NOT_FOLLOWING
    assert format_verdict(finding) == f"{NOT_FOLLOWING}: c; agrees: a; differs: b"
    alike = Finding(own, dict.fromkeys("abc", PartFigures(20)), "")
    assert format_verdict(alike) == DIFFERS
    assert count_verdicts([finding, alike, alike]) == {
        AGREES: 0, DIFFERS: 2, NOT_FOLLOWING: 1, NEEDS_HARDWARE: 0, NEEDS_MODEL: 0,
    }  # fmt: skip


def test_claims_are_answered_and_their_words_are_known() -> None:
    held = claims()
    assert ANSWERS.keys() <= held.keys()
    texts = set().union(*(model["claims"] for model in quality_figures().values()))
    for own in held.values():
        assert own.by in BASES
        assert own.by in (MODEL, HARDWARE) or own.id in ANSWERS, own.id
        assert set(own.small) <= texts, own.id


def test_every_figure_of_the_paper_is_there(shared: Path) -> None:
    held = claims()
    with (shared / "paper" / "claims.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        id = row["id"]
        own = [held[id], *(held[name] for name in (f"{id}.energy",) if name in held)]
        values = [value for one in own for value in one.values.values()]
        assert row["where"].split(",")[0] in own[0].where, id
        for figure in re.findall(r"\d+(?:\.\d+)?", row["value"]):
            assert float(figure) in values, (id, figure)


def test_equation_4_by_hand() -> None:
    assert arithmetic.touched_share() == pytest.approx((0.6 * 2 + 0.3 * 1.5 + 0.1 * 1) / 2)
    assert arithmetic.touched_share() == 0.875  # and not 0.42
    assert arithmetic.touched_share(1, 0, 0) == 1


def test_the_two_sets_of_times() -> None:
    assert arithmetic.table1_costs() == pytest.approx((5.6, 1.3, 0.6))
    assert arithmetic.figure5_costs() == pytest.approx((7.5, 0.8, 0.6))
    assert arithmetic.sequential_layer_ms(arithmetic.table1_costs()) == pytest.approx(14.4)
    assert arithmetic.all_resident_ms(arithmetic.table1_costs()) == pytest.approx(32 * (2.6 + 0.6))
    assert arithmetic.all_resident_ms(arithmetic.figure5_costs(), 0.5) == pytest.approx(
        32 * (0.8 + 0.6)
    )


def test_how_long_compute_idles() -> None:
    assert arithmetic.idle_share(PaperCosts(9, 1, 0)) == 0.9
    assert arithmetic.overlapped_idle_share(PaperCosts(9, 1, 0)) == pytest.approx(1 - 2 / 18)
    assert arithmetic.overlapped_idle_share(PaperCosts(9, 1, 7)) == pytest.approx(1 - 9 / 18)
    assert arithmetic.overlapped_idle_share(PaperCosts(1, 9, 0)) == 0


def test_what_loads_can_hide() -> None:
    # of 1.75 experts a token: Hot hides one of two, Warm the wide one, Cold none
    assert arithmetic.most_hidden_share() == pytest.approx((0.6 + 0.3) / 1.75)


@pytest.mark.parametrize(
    ("width", "ms"),
    [
        (1.0, 0.6 + 5.6 + 5.6 + 1.3),  # the first computes while the second is loaded
        (0.5, 0.6 + 5.6 + 2.8 + 0.65),
        (0.0, 0.6 + 5.6 + 1.3),  # nothing to hide behind
    ],
)
def test_a_cold_event_by_hand(width: float, ms: float) -> None:
    assert arithmetic.cold_event_ms(arithmetic.table1_costs(), width) == pytest.approx(ms)
