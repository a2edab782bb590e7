"""A model of which 2 GB are experts writes within a tenth of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from safetensors.torch import save_file  # noqa: E402

from crisp.hw.store.packing import pack  # noqa: E402
from tests.hw.sampled import peak  # noqa: E402

D_MODEL, D_FF, LAYERS, EXPERTS, WORDS = 1024, 3584, 12, 8, 512


def checkpoint(folder: Path) -> int:
    """A Mixtral of random weights, a layer a file; the bytes of all but its routed experts.

    Every expert has the same numbers, which are made once; routers tell them apart.
    """
    config = transformers.MixtralConfig(
        vocab_size=WORDS, hidden_size=D_MODEL, intermediate_size=D_FF, num_hidden_layers=LAYERS,
        num_attention_heads=16, num_key_value_heads=4, num_local_experts=EXPERTS,
        num_experts_per_tok=2, bos_token_id=None, eos_token_id=None, dtype=torch.bfloat16,
    )  # fmt: skip
    config.save_pretrained(folder)
    random = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Any:
        return (torch.randn(*shape, generator=random) / 32).to(torch.bfloat16)

    w1, w2, w3 = made(D_FF, D_MODEL), made(D_MODEL, D_FF), made(D_FF, D_MODEL)
    places, rest, ones = {}, 0, torch.ones(D_MODEL, dtype=torch.bfloat16)
    for layer in range(LAYERS + 1):
        at, tensors = f"model.layers.{layer}", dict[str, Any]()
        if layer == LAYERS:
            tensors["model.embed_tokens.weight"] = made(WORDS, D_MODEL)
            tensors["lm_head.weight"] = made(WORDS, D_MODEL)
            tensors["model.norm.weight"] = ones
        else:
            for name, n in (("q", D_MODEL), ("k", D_MODEL // 4), ("v", D_MODEL // 4)):
                tensors[f"{at}.self_attn.{name}_proj.weight"] = made(n, D_MODEL)
            tensors[f"{at}.self_attn.o_proj.weight"] = made(D_MODEL, D_MODEL)
            tensors[f"{at}.input_layernorm.weight"] = ones
            tensors[f"{at}.post_attention_layernorm.weight"] = ones
            tensors[f"{at}.block_sparse_moe.gate.weight"] = made(EXPERTS, D_MODEL)
        rest += sum(tensor.nbytes for tensor in tensors.values())
        if layer < LAYERS:
            for expert in range(EXPERTS):
                own = f"{at}.block_sparse_moe.experts.{expert}"
                for name, w in (("w1", w1), ("w2", w2), ("w3", w3)):
                    tensors[f"{own}.{name}.weight"] = w
        file = f"model-{layer:05}.safetensors"
        kept = {name: tensor.clone() for name, tensor in tensors.items()}  # none may share memory
        save_file(kept, folder / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    words(folder)
    return rest


def words(folder: Path) -> None:
    """A tokenizer of numbered words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.mark.slow
def test_memory_is_the_budget_and_little_more(tmp_path: Path) -> None:
    """Staging (two experts) and 100 MB; the experts alone would be 2.1 GB, and what is no expert's
    is mapped.
    """
    folder = tmp_path / "model"
    folder.mkdir()
    rest = checkpoint(folder)
    store = pack(folder, tmp_path / "store")
    assert store.spec.routed_bytes > 2e9
    used = peak(
        "generate", folder, "--store", store.path, "--policy", "lru", "--budget", "10%",
        "--prompt", " ".join(f"w{n}" for n in range(1, 40)), "--max-new-tokens", 4,
        more="import crisp.cli.commands.run.generate, crisp.hw.model.generate\n"
        "import transformers.models.mixtral.modeling_mixtral",
    )  # fmt: skip
    budget, staging = 0.1 * store.spec.routed_bytes, 2 * store.spec.expert_bytes
    assert used < budget + staging + 100e6
    assert used > 0.5 * budget
    assert rest > 60e6
