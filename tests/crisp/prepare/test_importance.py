"""Orders of neurons, and what leading neurons hold, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.adapter import Experts, expert_layout  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.prepare.calibration import CalibrationSums, LayerSums, calibrate  # noqa: E402
from crisp.prepare.importance import (  # noqa: E402
    NeuronOrder,
    block_contributions,
    importance_curves,
    neuron_scores,
    permutations,
)
from tests.crisp.tiny import mixtral, windows  # noqa: E402

# Layer 5: expert 0 saw ten tokens, expert 1 none. Norms of (gate and up, down) as given below.
FIRST = [[3.0, 0.0, 8.0, 1.0], [3.0, 5.0, 0.0, 6.0]]
DOWN = [[4.0, 2.0, 6.0, 0.0], [4.0, 12.0, 1.0, 8.0]]


def measured() -> CalibrationSums:
    sums = LayerSums.empty(2, 4, 4)
    sums.tokens[:] = [10, 0]
    sums.activation[0] = [10, 40, 10, 20]
    return CalibrationSums({5: sums})


def stand_in(first: Any = FIRST, down: Any = DOWN) -> dict[int, Any]:
    def norms(expert: int) -> Any:
        return torch.tensor(first[expert]).double(), torch.tensor(down[expert]).double()

    return {5: SimpleNamespace(norms=norms, n_experts=2, name="the layer")}


MAGNITUDE = [[5, 2, 10, 1], [5, 13, 1, 10]]


@pytest.mark.parametrize(
    ("order", "expected", "permutation"),
    [
        ("importance", [[1, 4, 1, 2], MAGNITUDE[1]], [[1, 3, 0, 2], [1, 3, 0, 2]]),
        ("output", [[4, 8, 6, 0], MAGNITUDE[1]], [[1, 2, 0, 3], [1, 3, 0, 2]]),
        ("magnitude", MAGNITUDE, [[2, 0, 1, 3], [1, 3, 0, 2]]),
        ("original", [[0] * 4] * 2, [[0, 1, 2, 3]] * 2),
    ],
)
def test_orders_by_hand(order: str, expected: Any, permutation: Any) -> None:
    """Equal scores keep their order: neurons 0 and 2 of expert 0 have the same importance."""
    scores = neuron_scores(NeuronOrder.read(order), measured(), stand_in())
    assert scores[5].dtype == np.float64
    np.testing.assert_allclose(scores[5], expected)
    order_of = permutations(scores)[5]
    assert order_of.dtype == np.int64 and order_of.tolist() == permutation


def test_random_follows_its_seed_and_differs_by_layer() -> None:
    twice = CalibrationSums({layer: LayerSums.empty(2, 64, 4) for layer in (0, 1)})
    none: dict[int, Any] = {0: None, 1: None}  # no weight is looked at
    draw = [
        permutations(neuron_scores(NeuronOrder("random", seed), twice, none)) for seed in (1, 1, 2)
    ]
    assert np.array_equal(draw[0][0], draw[1][0]) and not np.array_equal(draw[0][0], draw[2][0])
    assert not np.array_equal(draw[0][0], draw[0][1])
    assert not np.array_equal(draw[0][0][0], draw[0][0][1])
    assert np.array_equal(np.sort(draw[0][0], axis=1), [np.arange(64)] * 2)


def test_spelling() -> None:
    assert str(NeuronOrder.read(" random( 3 )")) == "random(3)"
    assert NeuronOrder.read("output") == NeuronOrder("output")
    with pytest.raises(CrispError, match="order of neurons 'importence'; did you mean 'importance"):
        NeuronOrder.read("importence")
    with pytest.raises(CrispError, match="takes 0 values"):
        NeuronOrder.read("magnitude(2)")
    with pytest.raises(CrispError, match="whole number"):
        NeuronOrder.read("random(.5)")


def test_magnitude_is_the_norm_of_all_weights_of_a_neuron() -> None:
    model = mixtral()
    experts = {layer.index: Experts.of(layer) for layer in expert_layout(model).layers}
    calibration = calibrate(model, windows([3]))
    scores = neuron_scores(NeuronOrder("magnitude"), calibration, experts)
    for at, layer in enumerate(model.model.layers):
        gate, up = layer.mlp.experts.gate_up_proj.detach().chunk(2, dim=1)  # [E, d_ff, d]
        down = layer.mlp.experts.down_proj.detach()  # [E, d, d_ff]
        squares = (gate**2).sum(2) + (up**2).sum(2) + (down**2).sum(1)
        np.testing.assert_allclose(scores[at], squares.sqrt().numpy(), rtol=1e-12)


def test_curves_by_hand() -> None:
    """Four neurons: the first eight points lie in the first of them, the next eight in two, ..."""
    calibration = measured()
    best = permutations(neuron_scores(NeuronOrder("importance"), calibration, stand_in()))
    curves = importance_curves(calibration, best)[5]
    assert curves.dtype == np.float32 and curves.shape == (2, 32)
    np.testing.assert_allclose(curves[0], np.repeat([4 / 8, 6 / 8, 7 / 8, 1], 8))
    assert not curves[1].any()
    as_stored = importance_curves(calibration, {5: np.arange(4)[None].repeat(2, 0)})[5]
    np.testing.assert_allclose(as_stored[0], np.repeat([1 / 8, 5 / 8, 6 / 8, 1], 8))


def test_curves_round_neurons_up() -> None:
    """Of 40 neurons, 1/32 is 1.25: the first point holds 2, the second (2.5) holds 3."""
    sums = LayerSums.empty(1, 40, 4)
    sums.tokens[:], sums.activation[:] = 1, 1
    curves = importance_curves(CalibrationSums({0: sums}), {0: np.arange(40)[None]})[0]
    np.testing.assert_allclose(curves[0, [0, 1, 15, 30, 31]], np.array([2, 3, 20, 39, 40]) / 40)


def test_contributions_by_hand() -> None:
    """Mean |activation| x norm of the down row is 4, 8, 6, 0: in the order 1, 3, 0, 2."""
    best = {5: np.array([[1, 3, 0, 2], [0, 1, 2, 3]])}
    contributions = block_contributions(measured(), best, stand_in(), 2)[5]
    assert contributions.dtype == np.float32
    assert contributions.tolist() == [[8 + 0, 4 + 6], [0, 0]]
    assert block_contributions(measured(), best, stand_in(), 3)[5].tolist() == [[12, 6], [0, 0]]


def test_damaged_weights_are_refused() -> None:
    down = [DOWN[0], [1.0, float("nan"), 1.0, 1.0]]
    with pytest.raises(CrispError, match="the layer: expert 1 has NaN or infinite weights"):
        neuron_scores(NeuronOrder("importance"), measured(), stand_in(down=down))
