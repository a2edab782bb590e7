"""The command, and that its page is the one in the documentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crisp.errors import CrispError, InvariantError
from crisp.reproduce.claims import claims
from crisp.reproduce.evidence import (
    BUDGETS,
    GPU,
    ORIN,
    TABLE1,
    Evidence,
    bound_run,
    order_run,
    speed_run,
)
from crisp.reproduce.findings.answers import findings
from crisp.reproduce.page import page
from crisp.reproduce.routing import ROWS, SEED, SEQUENCES, draw_trace
from crisp.reproduce.verdict import DIFFERS, VERDICTS
from crisp.sim import paper_runs
from crisp.sim.hardware import hardware_profile
from crisp.trace.chains import read_chains
from crisp.trace.synth import synthesize

DOCS = Path(__file__).resolve().parents[4] / "docs"

pytestmark = pytest.mark.seconds  # they share what the page is made of


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    """All that the command gathers, but for the Jetson's runs, which take longest."""
    whole = paper_runs.run_wanted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            paper_runs,
            "run_wanted",
            lambda run, inputs, spec, machine: whole(
                run, inputs, spec, hardware_profile(GPU) if run.machine == ORIN else machine
            ),
        )
        return paper_runs.gather(None)


def test_the_page_is_what_the_command_writes(evidence: Evidence) -> None:
    made = page.render_page(evidence, findings(evidence)).splitlines()
    held = (DOCS / page.PAGE).read_text(encoding="utf-8").splitlines()
    ours, theirs = (
        [line for line in lines if not line.startswith("| F11.orin")] for lines in (made, held)
    )
    assert ours == theirs
    assert sum(line.startswith("| F11.orin") for line in held) == 2


def test_pictures_are_there_and_small(evidence: Evidence, tmp_path: Path) -> None:
    for name, draw in page.PICTURES.items():
        assert 5_000 < (DOCS / page.IMAGES / f"{name}.png").stat().st_size < 100_000
        assert f"({page.IMAGES}/{name}.png)" in (DOCS / page.PAGE).read_text(encoding="utf-8")
        if name in ("figure9", "figure10"):
            draw(tmp_path / f"{name}.png", evidence)
            assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_every_claim_has_a_verdict(evidence: Evidence) -> None:
    found = findings(evidence)
    assert [finding.claim.id for finding in found] == list(claims())
    assert {finding.verdict for finding in found} == set(VERDICTS)


def test_what_the_text_argues_is_so(evidence: Evidence) -> None:
    for budget in BUDGETS:
        up, crisp, mo = (
            evidence.speed(speed_run(TABLE1, name, budget)) for name in ("up", "crisp", "mo")
        )
        assert up > crisp > mo
        for name, own in (("crisp", crisp), ("mo", mo)):
            assert own < 1000 / evidence.fewest_ms(name, budget)  # bounds are bounds
    assert evidence.speed(order_run("widest")) == pytest.approx(
        evidence.speed(order_run("fifo")), rel=0.01
    )
    # full offloading by hand: 32 layers of Table 1
    assert 1 / evidence.speed(speed_run(TABLE1, "fo", 10)) == pytest.approx(32 * 0.0144)


def test_bounds_are_of_the_kinder_routing_and_by_single_blocks(evidence: Evidence) -> None:
    assert evidence.skewed is not None and evidence.other is not None
    run = bound_run("crisp", 10)
    assert (run.scope, run.unit) == ("global", "block")  # 204 of 2,048 blocks, not 25 experts
    own = [routing.fewest_ms_here("crisp", 30) for routing in (evidence, evidence.skewed)]
    assert evidence.fewest_ms("crisp", 30) == min(own)
    assert evidence.skewed.described.mean("top") == pytest.approx(0.6, abs=0.01)
    by_id = {finding.claim.id: finding for finding in findings(evidence)}
    (found,) = [part for name, part in by_id["F10.30"].parts.items() if name == "CRISP"]
    assert found.most == 1000 / min(own)


def test_which_verdicts_other_routing_would_change(evidence: Evidence) -> None:
    assert evidence.other is not None
    kinder = replace(evidence, skewed=evidence.other)
    before, after = (
        {finding.claim.id: finding.verdict for finding in findings(one)}
        for one in (evidence, kinder)
    )
    changed = {id for id in before if before[id] != after[id]}
    assert changed == {"F10.30", "F14.tps"}  # as the page says
    assert {after[id] for id in changed} == {DIFFERS}


def test_mo_is_lru_where_a_layer_has_room_for_two(evidence: Evidence) -> None:
    assert [budget for budget in BUDGETS if evidence.mo_is_lru(budget)] == [30, 40, 50]
    said = {finding.claim.id: "MO is plain LRU" in finding.how for finding in findings(evidence)}
    assert [id for id, plain in said.items() if plain] == ["F10.30", "F10.50"]


def test_a_page_names_only_figures_that_exist(evidence: Evidence) -> None:
    by_id = {finding.claim.id: finding for finding in findings(evidence)}
    assert page._figure("F10.10 CRISP", by_id) == "8.3"
    for wrong in ("F10.11", "F10.10 nobody"):
        with pytest.raises(InvariantError, match=r"page\.md"):
            page._figure(wrong, by_id)


def test_the_command(
    crisp: Callable, tmp_path: Path, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        paper_runs, "gather", lambda trace, progress: replace(evidence, trace_name=trace)
    )
    monkeypatch.setattr(page, "PICTURES", {})
    done = crisp("reproduce")
    assert done.code == 0, done.err
    for id in claims():
        assert f"\n{id} " in done.out
    assert max(map(len, done.out.splitlines())) <= 100
    assert done.out.index(f"{len(claims())} claims, ") < done.out.index("T1.load")
    assert done.out.splitlines()[-1].endswith("pictures: --out FOLDER")
    assert "wrote" not in done.out
    done = crisp("reproduce", "--details")
    assert all(f"\n{id}: " in done.out for id in claims())
    assert max(map(len, done.out.splitlines())) <= 100
    done = crisp("reproduce", "--trace", "tiny-mixtral-code", "--out", tmp_path / "x")
    assert done.code == 0, done.err
    text = (tmp_path / "x" / page.PAGE).read_text()
    assert "made with `--trace tiny-mixtral-code`" in text
    assert "](quality.md)" not in text and "quality.md" in text  # which is not in that folder
    assert "](quality.md)" in (DOCS / page.PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "tiny-deepseek-code"], "8 experts, but the trace has 32"),
        (["--trace", "tiny-mixtral-cod"], "did you mean 'tiny-mixtral-code'"),
        (["--trace", "nothing.trace.safetensors"], "no such file"),
        (["--out", __file__], "cannot be made: "),
    ],
)
def test_mistakes(crisp: Callable, arguments: list[str], message: str) -> None:
    done = crisp("reproduce", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.count("\n") == 1


def test_a_trace_that_would_be_replaced_or_is_short(crisp: Callable, tmp_path: Path) -> None:
    short = draw_trace().select(slice(0, 900))
    file = tmp_path / page.PAGE
    short.save(file)
    done = crisp("reproduce", "--trace", file, "--out", tmp_path)
    assert done.code == 2
    assert "would replace --trace" in done.err
    with pytest.raises(CrispError, match="900 rows, expected 1,280 at least"):
        paper_runs.gather(str(file))


def test_a_drawn_trace_loads_what_the_whole_statistics_load(shared: Path) -> None:
    folder = shared / "traces"
    chains = read_chains(
        folder / "mixtral-8x7b-pair-counts.csv", folder / "mixtral-8x7b-persistence.csv"
    )
    traces = draw_trace(), synthesize(chains, ROWS, SEED, sequences=SEQUENCES)
    loads = []
    for trace in traces:
        spec, inputs = paper_runs.inputs_of(trace)
        for budget in (10, 50):
            run = speed_run(TABLE1, "crisp", budget)
            found = paper_runs.run_wanted(run, inputs, spec, hardware_profile(TABLE1)).metrics
            loads.append(found["bytes_per_token"])
    assert np.array(loads[:2]) == pytest.approx(loads[2:], rel=0.03)
