"""What weights of 8 and 4 bits cost: the figures of docs/store.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.checkpoint.loading import load_model, quantize_experts, to_float32  # noqa: E402
from crisp.policy import named  # noqa: E402
from crisp.quality import evaluate  # noqa: E402
from crisp.text_windows import read_windows  # noqa: E402

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"-?\d+\.\d+")


def printed(model: str) -> dict[str, list[str]]:
    """By type of weights: perplexity, loss and predictions kept of a model, as on the page."""
    page = (ROOT / "docs" / "store.md").read_text(encoding="utf-8")
    head, *lines = re.findall(
        r"^\| (?:weights|as published|int8|int4).*perplexity.*(?:\n\|.*)+", page, re.M
    )[0].split("\n")
    first = [cell.strip() for cell in head.split("|")[1:-1]].index(f"{model}: perplexity")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]
    return {row[0].split(",")[0]: row[first : first + 3] for row in cells}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-mixtral", "tiny-deepseek"])
def test_the_page_says_what_is_measured(model: str, shared: Path) -> None:
    texts = [shared / "data" / f"{kind}.heldout.txt" for kind in ("code", "docs", "kjv")]
    expected, reference = printed(model), None
    for dtype in ("as published", "int8", "int4"):
        loaded = to_float32(load_model(str(ROOT / "traces" / model)))
        loaded = loaded if reference is None else quantize_experts(loaded, dtype)
        windows = read_windows(loaded.tokenizer, texts, 256, 256, 18432)
        quality = evaluate(loaded, windows, named("fo"), reference=reference)
        figures = quality.whole
        words = [f"{figures.perplexity.value:.2f}", "", ""]
        if figures.ratio is not None and figures.retention is not None:
            low, high = (f"{100 * end - 100:z.1f}" for end in figures.ratio.interval or ())
            words[1:] = [
                f"{100 * figures.ratio.value - 100:z.1f} % ({low} to {high})",
                f"{100 * figures.retention.value:.1f} %",
            ]
        # another order of sums in float32 may lead over the edge between two last digits
        assert [NUMBER.sub("#", word) for word in words] == [
            NUMBER.sub("#", x) for x in expected[dtype]
        ]
        for word, kept in zip(words, expected[dtype], strict=True):
            for ours, theirs in zip(NUMBER.findall(word), NUMBER.findall(kept), strict=True):
                digit = 10 ** -len(theirs.partition(".")[2])
                assert abs(float(ours) - float(theirs)) < 1.5 * digit
        reference = reference or quality.scores
