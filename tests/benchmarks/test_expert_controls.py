"""Fake quantisation and expert dropping, on the trained model of the repository."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.quality.experiments.expert_controls import dropped, fake_quantize, quantized  # noqa: E402
from crisp.adapter import record_routing  # noqa: E402
from crisp.checkpoint.loading import load_model  # noqa: E402
from crisp.errors import CrispError  # noqa: E402

ROOT = Path(__file__).parents[2]
TOKENS = torch.arange(5, 53).reshape(2, 24) * 17 % 2048


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    yield load_model(str(ROOT / "traces" / "tiny-mixtral")).model.float()


def logits(model: Any) -> Any:
    with torch.inference_mode():
        return model(input_ids=TOKENS, use_cache=False).logits


def same(value: Any) -> dict[int, Any]:
    return {layer: np.array([value] * 8) for layer in range(6)}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_group_takes_no_more_values_than_its_bits_allow(bits: int) -> None:
    weight = torch.randn(3, 150, generator=torch.Generator().manual_seed(1))
    rounded = fake_quantize(weight, bits)
    step = weight[:, :64].abs().amax(1) / (2 ** (bits - 1) - 1)
    assert ((rounded[:, :64] - weight[:, :64]).abs() <= step[:, None] / 2 * 1.0001).all()
    assert all(len(row.unique()) <= 2**bits - 1 for row in rounded[:, :64])
    assert torch.allclose(fake_quantize(rounded, bits), rounded)  # it is there already


def test_sixteen_bits_change_nothing_and_two_bits_do_until_the_end(model: Any) -> None:
    plain = logits(model)
    with quantized(model, same(16)):
        assert torch.equal(logits(model), plain)
    with quantized(model, same(2)):
        assert not torch.allclose(logits(model), plain, atol=0.1)
    assert torch.equal(logits(model), plain)
    with pytest.raises(CrispError, match="1 bits"), quantized(model, same(1)):
        pass
    assert torch.equal(logits(model), plain)


def test_dropped_experts_are_never_chosen_and_the_rest_is_ranked_as_before(model: Any) -> None:
    with torch.inference_mode(), record_routing(model) as recorder:
        before = logits(model)
        plain = recorder.take().experts
        gone = same(False)
        gone[0] = np.arange(8) == plain[0, 0, 0]
        with dropped(model, gone):
            logits(model)
        found = recorder.take()
    assert not (found.experts[:, 0] == plain[0, 0, 0]).any()
    kept = (plain[:, 0] != plain[0, 0, 0]).all(1)  # these tokens had chosen among the rest anyway
    assert kept.any()
    assert not kept.all()
    np.testing.assert_array_equal(found.experts[kept, 0], plain[kept, 0])
    np.testing.assert_allclose(found.weights[:, 0].sum(1), 1, rtol=1e-6)
    assert torch.equal(logits(model), before)


def test_dropping_too_many_is_refused(model: Any) -> None:
    gone = same(False)
    gone[2] = np.arange(8) > 0
    with pytest.raises(CrispError, match=r"layers\.2.*fewer are left"), dropped(model, gone):
        logits(model)
