"""What must be known beside figures."""

from __future__ import annotations

from crisp.report.caveats import RunKind, caveats
from crisp.report.conditions import conditions
from crisp.report.page import render_page
from crisp.report.table import from_runs
from tests.crisp.run.runs import whole

NARROW = "speed alone does not rank policies: widths cost quality, which is not simulated"


def kind(
    model: str | None = "mixtral-8x7b",
    layers: str | None = "32",
    traced: str | None = "mixtral-8x7b",
    width: str | None = "full",
) -> RunKind:
    return RunKind(model, layers, traced, width)


def test_a_whole_model_with_whole_experts_needs_no_word() -> None:
    assert caveats([kind(), kind(traced=None), kind("of mine", "6", "of mine")]) == []


def test_layers_that_are_left_out_are_told_of_models_that_are_known() -> None:
    """Mixtral has 32."""
    told = ["6 of 32 layers of mixtral-8x7b: tokens/s are of these layers"]
    assert caveats([kind(layers="6"), kind(layers="6")]) == told
    assert caveats([kind(layers="many"), kind(layers=None)]) == []


def test_sizes_of_another_model_are_told() -> None:
    assert caveats([kind(traced="tiny")]) == ["the routing is tiny's, the sizes are mixtral-8x7b's"]


def test_one_narrow_width_is_enough() -> None:
    assert caveats([kind(), kind(width="uniform(share=0.5)"), kind(width="single")]) == [NARROW]


def test_of_many_models_three_are_told() -> None:
    lines = caveats([kind(layers=str(n)) for n in range(1, 6)])
    assert len(lines) == 4
    assert lines[-1] == "and 2 more like these, of other models"


def test_they_stand_below_the_title_of_a_page() -> None:
    model = whole().settings["model"] | {"name": "mixtral-8x7b"}
    policy = whole().settings["policy"] | {"width": "single"}
    table = from_runs([whole({"model": model, "policy": policy})])
    text = render_page(table, conditions(table), [], [])
    head = text.partition("</header>")[0]
    layers = "6 of 32 layers of mixtral-8x7b: tokens/s are of these layers"
    assert f'<p class="note">{layers}.</p>' in head
    assert f'<p class="note">{NARROW}.</p>' in head
