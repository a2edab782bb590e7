"""What experts compute is told from their numbers, whatever their class is called."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.adapter import Experts, expert_layout, find_activation  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from tests.crisp.adapter.test_families import built, odd, spoiled  # noqa: E402


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        ("aria", "AriaExperts", "silu"),
        ("lfm2_moe", "Lfm2MoeExperts", "silu"),
        ("gemma4", "Gemma4TextExperts", "gelu_tanh"),
        ("openai_privacy_filter", "OpenAIPrivacyFilterExperts", "gpt_oss(1.3,0.5)"),
        ("minimax_m3_vl", "MiniMaxM3VLExperts", "gpt_oss(1.3,0.5)"),
        ("deepseek_v4", "DeepseekV4Experts", "clamped_silu(0.5)"),
        ("glm5_next", "Glm5NextTextExperts", "clamped_silu(0.5)"),
        ("inkling2", "Inkling2Experts", "softcapped_silu(1,1)"),
        ("gpt_oss", "GptOssExperts", "gpt_oss(1.3,0.5)"),
    ],
)
def test_of_modules_of_transformers(family: str, name: str, expected: str) -> None:
    assert str(find_activation(Experts.of(odd(family, name)))) == expected


def test_without_a_gate() -> None:
    layer = expert_layout(built("nemotron_h")).layers[0]
    assert str(find_activation(Experts.of(layer))) == "relu2"


class Larger(torch.nn.Module):
    """SiLU, and a thousandth more."""

    def forward(self, x: Any) -> Any:
        return 1.001 * torch.nn.functional.silu(x)


@pytest.mark.parametrize("act", [torch.nn.Tanh(), torch.nn.LeakyReLU(0.01), Larger()])
@pytest.mark.parametrize("name", ["mixtral", "nemotron_h"])
def test_another_one_is_refused(name: str, act: Any) -> None:
    layer = spoiled(name, act_fn=act)
    with pytest.raises(CrispError, match=r"experts \(.*Experts\): its activation is not underst"):
        find_activation(Experts.of(layer))
