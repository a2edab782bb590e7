"""Shapes of tensors without memory, against torch's own and against tensors in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.checkpoint.meta_device import on_meta_device, shapes_only  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def outcome(join: Callable[..., Any], tensors: list[Any], dim: int) -> Any:
    """The shape and type of what comes out; None: it was refused."""
    try:
        joined = join(tensors, dim)
    except (RuntimeError, IndexError, ValueError):
        return None
    return joined.shape, joined.dtype


@settings(deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3),
    alike=st.booleans(),
    dim=st.integers(-4, 4),
)
def test_joined_shapes_are_those_of_tensors_in_memory(
    shapes: list[list[int]], alike: bool, dim: int
) -> None:
    """What torch refuses is refused."""
    shapes = [shapes[0] for _ in shapes] if alike else shapes
    real = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    for join in (torch.stack, torch.cat):
        with shapes_only():
            found = outcome(join, [x.to("meta") for x in real], dim)
        assert found == outcome(join, real, dim)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "Olmoe", "DeepseekV3", "GptOss"])
def test_a_model_has_the_tensors_that_torch_makes_of_it(family: str) -> None:
    """Names, shapes and types, tied ones tied; all of them on the meta device."""
    config = getattr(transformers, f"{family}Config")(**SMALL, pad_token_id=0)
    make = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        expected = make(config)
    model = on_meta_device(lambda: make(config))

    def tensors(model: Any) -> list[Any]:
        named = [*model.named_parameters(), *model.named_buffers()]
        return [(name, x.shape, x.dtype, x.device.type) for name, x in named]

    assert tensors(model) == tensors(expected)
    assert {kind for *_, kind in tensors(model)} == {"meta"}


def test_a_model_that_needs_ranges_without_memory_gets_them() -> None:
    class Mixed(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.ones(4) * torch.arange(4))

    model = on_meta_device(Mixed)
    assert model.steps.is_meta and model.steps.shape == (4,)


def test_in_memory_numbers_are_drawn_as_ever() -> None:
    with shapes_only():
        assert torch.zeros(100).normal_().abs().max() > 0
        assert torch.nn.init.uniform_(torch.zeros(100), 1, 2).min() >= 1
        assert torch.zeros(4, device="meta").normal_().is_meta
