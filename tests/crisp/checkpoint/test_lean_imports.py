"""What `crisp generate` does not import, and what stands in for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs the extra hf")

from crisp.hw.store.packing import pack

MODEL = Path(__file__).parents[3] / "traces" / "tiny-mixtral"

# Nothing of these runs a model that writes; each is megabytes, and some are tens of them.
NEEDLESS = (
    "torch._inductor", "torch._dynamo.utils", "torch.distributed.tensor", "torch.onnx",
    "torch.fx.experimental.symbolic_shapes", "sympy", "triton", "accelerate", "boto3",
    "scipy.optimize", "sklearn", "pandas", "matplotlib", "datasets", "torchvision",
    "transformers.models.llama.modeling_llama", "transformers.trainer",
)  # fmt: skip


def run(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_imports_no_compiler_and_nothing_that_distributes(tmp_path: Path) -> None:
    store = pack(MODEL, tmp_path / "store", block=16).path
    code = (
        "import sys\nfrom crisp.cli.main import main\ntry:\n    main(sys.argv[1:])\n"
        "finally:\n    print('modules', *sys.modules)"
    )
    said = run(
        code, "generate", MODEL, "--store", store, "--policy", "lru", "--budget", "30%",
        "--prompt", "def read(path):", "--max-new-tokens", 2,
    )  # fmt: skip
    imported = set(said.rpartition("modules ")[2].split())
    assert {"torch", "transformers.models.mixtral.modeling_mixtral"} <= imported
    assert not imported & set(NEEDLESS)


def test_a_stand_in_gives_way_to_the_module_itself() -> None:
    """As soon as anything is wanted that it does not have, be it a module of the package."""
    run(
        "import sys\n"
        "from crisp.checkpoint.lean_imports import StandIn, lean_imports\n"
        "lean_imports()\n"
        "import torch, transformers.masking_utils as masks\n"
        "assert isinstance(sys.modules['torch._dynamo'], StandIn)\n"
        "decorated = torch.compiler.disable(len)\n"
        "assert decorated is len and isinstance(sys.modules['torch._dynamo'], StandIn)\n"
        "import torch._dynamo.config\n"
        "assert not any(isinstance(module, StandIn) for module in sys.modules.values())\n"
        "assert torch._dynamo is sys.modules['torch._dynamo']\n"
        "assert torch.compiler.disable(len) is not len\n"
    )


def test_masks_that_need_the_compilers_transform_get_it() -> None:
    """transformers keeps the stand-in's name, and calls it: [1, 1, 2, 3] from the second query."""
    run(
        "import sys\n"
        "from crisp.checkpoint.lean_imports import StandIn, lean_imports\n"
        "lean_imports()\n"
        "import torch, transformers.masking_utils as masks\n"
        "mask = masks.sdpa_mask(batch_size=1, q_length=2, kv_length=3, q_offset=1,\n"
        "    allow_is_causal_skip=False, use_vmap=True)\n"
        "assert mask.tolist() == [[[[True, True, False], [True, True, True]]]]\n"
        "assert not isinstance(sys.modules['torch._dynamo'], StandIn)\n"
    )


def test_what_is_imported_already_stays() -> None:
    run(
        "import torch._dynamo, sys\n"
        "before = sys.modules['torch._dynamo']\n"
        "from crisp.checkpoint.lean_imports import lean_imports\n"
        "lean_imports()\n"
        "assert sys.modules['torch._dynamo'] is before\n"
    )
