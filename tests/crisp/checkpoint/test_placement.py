"""Where a neuron lies in tensors that a rule makes one of, on cases small enough to count out."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")

from crisp.checkpoint.placement import Part, Placement, placements  # noqa: E402

D_FF, D = 3, 2
GATE, UP, DOWN = range(3)


def halves(whole: Any) -> list[tuple[int, Any]]:
    """Gates, then ups: [1, 2 d_ff, d]."""
    return [(GATE, whole[0, :D_FF]), (UP, whole[0, D_FF:])]


def test_one_tensor_for_each_matrix() -> None:
    found = placements(
        {"w1": (D_FF, D), "w3": (D_FF, D)},
        lambda x: torch.cat([x["w1"], x["w3"]])[None],
        halves,
    )
    # neuron n begins at number 2 n of its own tensor
    assert found == {
        "w1": Placement(1, 2, (Part(GATE, 0, 2, 1),)),
        "w3": Placement(1, 2, (Part(UP, 0, 2, 1),)),
    }


def test_gate_and_up_behind_one_another_side_by_side_and_transposed() -> None:
    behind = placements({"w": (1, 2 * D_FF, D)}, lambda x: x["w"], halves)
    assert behind == {"w": Placement(2, 2, (Part(GATE, 0, 2, 1), Part(UP, 6, 2, 1)))}

    def apart(x: Any) -> Any:  # rows gate, up, gate, up, ...
        return torch.cat([x["w"][:, ::2], x["w"][:, 1::2]], 1)

    beside = placements({"w": (1, 2 * D_FF, D)}, apart, halves)
    assert beside == {"w": Placement(1, 4, (Part(GATE, 0, 4, 1), Part(UP, 2, 4, 1)))}
    turned = placements({"w": (1, D, 2 * D_FF)}, lambda x: x["w"].transpose(1, 2), halves)
    # number (c, n) of [d, 2 d_ff] is 6 c + n: two rows of two halves of three neurons
    assert turned == {"w": Placement(4, 1, (Part(GATE, 0, 1, 6), Part(UP, 3, 1, 6)))}


def test_a_down_projection() -> None:
    found = placements({"w2": (D, D_FF)}, lambda x: x["w2"][None], lambda w: [(DOWN, w[0].T)])
    assert found == {"w2": Placement(2, 1, (Part(DOWN, 0, 1, 3),))}


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: torch.cat([x["w1"], x["w3"]])[None].flip(1),  # the last neuron first
        lambda x: torch.cat([x["w1"].flip(1), x["w3"]])[None],  # columns the other way
        lambda x: torch.cat([x["w1"][:2], x["w3"][:1], x["w1"][2:], x["w3"][1:]])[None],
        lambda x: torch.cat([x["w1"], x["w1"]])[None],  # one of them is not used
    ],
)
def test_what_is_not_understood(convert: Any) -> None:
    assert placements({"w1": (D_FF, D), "w3": (D_FF, D)}, convert, halves) is None
