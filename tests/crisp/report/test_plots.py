from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from crisp.errors import CrispError
from crisp.report.plots import Line, check_format, draw_gantt, draw_throughput, select_first_events
from crisp.run.timeline import COMPUTE, EVENT, LAYER, LOAD, PREFETCH, Rows

MS = 1_000_000


def row(kind: int, event: int, start: int, end: int) -> list[int]:
    return [0, event, 1, kind, 2, 0, 4, start * MS, end * MS, 0, 0]


def share_of(colour: str, image: bytes) -> float:
    """The share of pixels of exactly this colour."""
    import matplotlib.image

    pixels = matplotlib.image.imread(BytesIO(image))[:, :, :3]
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return float((np.abs(pixels - wanted) < 0.002).all(axis=2).mean())


def test_bars_are_as_long_as_their_intervals() -> None:
    rows = np.array([row(LAYER, 0, 0, 1), row(LOAD, 0, 1, 81), row(COMPUTE, 0, 81, 101)])
    out = BytesIO()
    draw_gantt(out, {"one": rows}, 4, "title", "note")
    load, compute = share_of("#0072B2", out.getvalue()), share_of("#E69F00", out.getvalue())
    # 80 ms against 20 ms, and the same small patch of each in the legend
    assert 3.0 < load / compute < 4.2
    assert share_of("#56B4E9", out.getvalue()) == 0, "nothing was prefetched: not in the legend"


def test_timelines_share_an_axis() -> None:
    def bars(end: int) -> Rows:
        return np.array([row(LAYER, 0, 0, 1), row(COMPUTE, 0, 1, end)])

    alone, beside = BytesIO(), BytesIO()
    draw_gantt(alone, {"short": bars(11)}, 4, "", "")
    draw_gantt(beside, {"short": bars(11), "long": bars(101)}, 4, "", "")
    # alone 10 of 11 ms is orange; beside the long one, 10 and 100 of 2 x 101
    assert share_of("#E69F00", alone.getvalue()) > 1.2 * share_of("#E69F00", beside.getvalue())


def test_few_events_are_whole_and_few() -> None:
    rows = np.array(
        [row(kind, event, 10 * event, 10 * event + 9) for event in range(30) for kind in (0, 2, 1)]
    )
    shown = select_first_events(rows)
    assert np.unique(shown[:, EVENT], return_counts=True)[1].tolist() == [3] * 8
    crowded = np.array([row(LOAD, 0, at, at + 1) for at in range(300)])
    assert len(select_first_events(crowded)) == 300, "one event at least"


def test_a_prefetch_beside_the_events_is_shown() -> None:
    rows = np.array([row(LAYER, 0, 0, 9), row(PREFETCH, -1, 2, 8), row(COMPUTE, 0, 9, 12)])
    assert len(select_first_events(rows)) == 3


def drawn(rows: list[list[int]]) -> list[str]:
    """All texts of a picture, whose blocks are 4 to an expert."""
    out = BytesIO()
    texts: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, *rest, **more: texts.extend(
            text.get_text() for text in self.findobj(Text)
        ))  # fmt: skip
        draw_gantt(out, {"one": np.array(rows)}, 4, "title", "note.")
    return texts


def test_blocks_of_an_expert_have_one_label() -> None:
    def block(place: int) -> list[int]:
        return [0, 0, 1, LOAD, 2, place, 1, (1 + 10 * place) * MS, (11 + 10 * place) * MS, 0, 0]

    texts = drawn([row(LAYER, 0, 0, 1), *(block(place) for place in range(3))])
    assert [text for text in texts if text.startswith("E2")] == ["E2 3/4"]
    assert "note. E2 3/4: expert 2, 3 of its 4 blocks." in texts


def test_only_labels_that_are_drawn_are_explained() -> None:
    whole = drawn([row(LAYER, 0, 0, 1), row(LOAD, 0, 1, 81)])
    assert "note. E2: expert 2." in whole
    assert "note." in drawn([row(LAYER, 0, 0, 1)])


def test_throughput_draws_a_line_for_each_policy(tmp_path: Path) -> None:
    lines = [
        Line("fo", [0.1, 0.5], [2, 2]),
        Line("up", [0.1, 0.5], [20, 200], "--"),
        Line("bound", [0.1, 0.5], [300, 300], ":"),
    ]
    draw_throughput(tmp_path / "t.png", {"one": lines, "two": lines}, "title", "note")
    image = (tmp_path / "t.png").read_bytes()
    assert share_of("#555555", image) > 0.001
    assert share_of("#0072B2", image) > 0.001
    assert share_of("#D55E00", image) == 0


@pytest.mark.parametrize("name", ["p.png", "p.SVG", "p.pdf"])
def test_what_can_be_drawn(name: str, tmp_path: Path) -> None:
    check_format(tmp_path / name)
    draw_gantt(tmp_path / name, {"one": np.array([row(LAYER, 0, 0, 1)])}, 4, "", "")
    assert (tmp_path / name).stat().st_size > 1000


def test_other_formats_are_refused() -> None:
    with pytest.raises(CrispError, match=r"^p\.gif: expected a name that ends in \.png"):
        check_format(Path("p.gif"))
