"""Weights that are no experts' lie in the checkpoint's files, and take no memory of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.hw.model.resident import ResidentModel, open_resident  # noqa: E402
from crisp.hw.store.packing import pack  # noqa: E402

ROOT = Path(__file__).parents[3]
WORDS = 40_000

OPENING = """
import sys
from pathlib import Path
from crisp.hw.model.resident import open_resident
from crisp.hw.store.reader import Store

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024

open_resident(Path(sys.argv[1]), Store.open(sys.argv[2]))  # imports what it needs
before = anonymous()
model = open_resident(Path(sys.argv[1]), Store.open(sys.argv[2]))
print(anonymous() - before)
"""


def checkpoint(folder: Path, kind: Any = None, **more: Any) -> Path:
    """A Mixtral of two small layers and a large vocabulary: 80 MB of skeleton in bfloat16."""
    config = transformers.MixtralConfig(
        vocab_size=WORDS, hidden_size=512, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        bos_token_id=None, eos_token_id=None, dtype=kind or torch.bfloat16, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).to(kind or torch.bfloat16)
    model.save_pretrained(folder)
    words(folder)
    return folder


def words(folder: Path) -> None:
    """A tokenizer of numbered words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"w{n}": n for n in range(9)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def opened(folder: Path, store: Path) -> ResidentModel:
    return open_resident(folder, pack(folder, store, block=16))


def mapped(folder: Path, tensor: Any) -> bool:
    """Whether a tensor lies in a mapping of a file in ``folder``, by the system's account."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(rf"(\w+)-(\w+) .*{re.escape(str(folder))}/.*\.safetensors$", line)
        if found is not None:
            first, last = (int(number, 16) for number in found.groups())
            if first <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= last:
                return True
    return False


def test_weights_lie_in_the_checkpoints_file(tmp_path: Path) -> None:
    """All but the experts; to the bit what is stored there, and still so when files are closed."""
    from safetensors.torch import load_file

    folder = checkpoint(tmp_path / "model")
    model = opened(folder, tmp_path / "store").loaded.model
    weights = {name: x for name, x in model.named_parameters() if not x.is_meta}
    assert {name for name, x in weights.items() if not mapped(folder, x)} == set()
    stored = load_file(folder / "model.safetensors")
    same = [name for name in weights if name in stored and torch.equal(weights[name], stored[name])]
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= set(same)
    assert len(same) == len(weights) - 2  # the routers have another name there


def test_a_skeleton_takes_no_anonymous_memory(tmp_path: Path) -> None:
    """Opening once more takes less than a quarter of its 82 MB."""
    folder = checkpoint(tmp_path / "model")
    store = pack(folder, tmp_path / "store", block=16).path
    done = subprocess.run(
        [sys.executable, "-c", OPENING, str(folder), str(store)],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * WORDS * 512 * 2 / 4


def test_what_has_another_type_than_the_file_is_converted(tmp_path: Path) -> None:
    """The config says bfloat16, and the file holds float32: nothing of it can be mapped."""
    folder = checkpoint(tmp_path / "model", torch.float32)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("float32", "bfloat16"))
    model = opened(folder, tmp_path / "store").loaded.model
    weights = [x for x in model.parameters() if not x.is_meta]
    assert {x.dtype for x in weights} == {torch.bfloat16}
    assert not any(mapped(folder, x) for x in weights)


def test_tied_weights_are_one_tensor_in_the_file(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", tie_word_embeddings=True)
    model = opened(folder, tmp_path / "store").loaded.model
    head, table = model.lm_head.weight, model.model.embed_tokens.weight
    assert head.data_ptr() == table.data_ptr() and mapped(folder, head)
