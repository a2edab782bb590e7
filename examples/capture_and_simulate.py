"""Record the routing of a small model that writes text, then simulate policies with it.

Needs the extra hf: pip install '.[hf]'
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from crisp import load_setup
from crisp.capture import Recipe, capture, load_model
from crisp.sim import simulate

ROOT = Path(__file__).resolve().parents[1]

model = load_model(str(ROOT / "traces/tiny-mixtral"))
# 33 tokens are written; the last is never read again, which leaves 32 decode rows a sequence.
recipe = Recipe(prompt_tokens=32, new_tokens=33, sequences=4)
trace = capture(model, [ROOT / "README.md"], recipe)

# The first half of the sequences is counted, the rest is run. The routing is the small model's;
# the sizes are those of a large one with as many experts.
with TemporaryDirectory() as folder:
    path = Path(folder) / "mine.trace.safetensors"
    trace.save(path)
    setup = load_setup(path, model="mixtral-8x7b", bits="4.25")
for policy in ("fo", "lru", "crisp"):
    metrics = simulate(setup.case(policy, "30%"), "rtx4090-pcie4").metrics
    print(f"{policy:5} {metrics['tokens_per_second']:6.1f} tokens/s", end="")
    print(f"  {metrics['bytes_per_token'] / 1e6:6,.0f} MB loaded a token")
