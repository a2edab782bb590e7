"""The geometry of every decoder-only MoE of transformers, against its modules one by one."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.checkpoint.geometry.read import read_model  # noqa: E402
from crisp.model.config import FAMILIES, read_geometry  # noqa: E402

# what a family's own defaults leave open
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 16, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
    },
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
}
PLAIN = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias")
PLAIN = (*PLAIN, "down_proj_bias")


def _uses_experts(model_type: str) -> bool:
    """Whether the family's modelling code uses transformers' common experts module."""
    folder = Path(inspect.getfile(transformers.CONFIG_MAPPING[model_type])).parent
    code = folder.glob("modeling_*.py")
    return any("use_experts_implementation" in path.read_text() for path in code)


def language_models() -> list[str]:
    """The families of text alone that AutoModelForCausalLM makes, and use the common module."""
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted(name for name in names if _uses_experts(name))


def built(model_type: str) -> tuple[Any, Any]:
    """A model of four layers on the meta device, and its config."""
    more = {"num_hidden_layers": 4, **MORE.get(model_type, {})}
    try:
        config = transformers.AutoConfig.for_model(model_type, **more)
    except Exception:  # of some the number of layers follows from lists
        config = transformers.AutoConfig.for_model(model_type, **MORE.get(model_type, {}))
    text = config.get_text_config()
    if text is not config:
        text = transformers.AutoConfig.for_model(text.model_type, num_hidden_layers=4)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(text), text


def is_experts(module: Any) -> bool:
    interface = transformers.integrations.moe.ExpertsInterface
    cells = getattr(type(module).forward, "__closure__", None) or ()
    return any(isinstance(cell.cell_contents, interface) for cell in cells)


def layer_of(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


FAMILY_NAMES = language_models()


def test_there_are_many() -> None:
    assert len(FAMILY_NAMES) >= 45
    assert set(FAMILIES) - {"deepseek"} <= set(FAMILY_NAMES)


@pytest.mark.seconds
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_family_as_its_modules_are(name: str, tmp_path: Path) -> None:
    try:
        model, config = built(name)
    except (TypeError, ValueError, AttributeError) as error:
        pytest.skip(f"its own defaults make no model: {error}")
    experts: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        layer = layer_of(path)
        if layer is not None and is_experts(module) and "shared" not in path:
            assert layer not in experts
            experts[layer] = path, module
    if not experts:
        pytest.skip("its defaults have no routed experts")
    (_, first), *_ = experts.values()
    n_layers = config.num_hidden_layers
    beside = [0] * n_layers
    for key, value in model.state_dict().items():
        layer = layer_of(key)
        if layer is None:
            continue
        inside = experts.get(layer, ("?", None))[0]
        if key.rpartition(".")[0] != inside or key.rpartition(".")[2] not in PLAIN:
            beside[layer] += value.numel()
    (tmp_path / "config.json").write_text(
        json.dumps({**config.to_dict(), "model_type": config.model_type})
    )
    found = read_model(tmp_path)
    spec = found.spec
    assert (spec.n_layers, spec.moe_layers) == (n_layers, tuple(sorted(experts)))
    assert spec.n_experts == first.num_experts
    assert {spec.d_model, spec.d_ff} == set(first.down_proj.shape[1:])
    assert spec.matrices == (3 if first.has_gate else 2)
    assert spec.biases == first.has_bias
    assert spec.dense_params == tuple(beside)
    alone = read_geometry(json.loads((tmp_path / "config.json").read_text()), name)
    assert alone.digest() == spec.config_hash
    for key in ("moe_layers", "n_experts", "top_k", "d_model", "d_ff", "matrices"):
        assert getattr(alone, key) == getattr(spec, key), key
