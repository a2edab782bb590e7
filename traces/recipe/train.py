"""Train a small Mixture-of-Experts language model on text that any machine with Python has.

    python traces/recipe/train.py deepseek OUT --text bible.txt --leave-out heldout/*.txt

Needs the extra ``hf`` and downloads nothing. On one machine the same seed gives the same model;
another processor or another version of torch rounds differently.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from corpus import Text, corpus, kind
from tokens import draw_batch, encode, make_tokenizer

COMMON = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
    },
}


@dataclass(frozen=True)
class Plan:
    """The schedule of a training.

    The learning rate rises linearly to ``rate``, stays there, and falls linearly to zero over the
    last share ``fall`` of the steps. With ``seconds`` in place of ``steps``, the number of steps
    follows from what the machine has managed when the fall should begin. Until then nothing depends
    on it, so that a run with the same number of steps repeats the training.
    """

    steps: int | None = None
    seconds: float = math.inf
    tokens: int = 2048  # of a step
    short: int = 256  # tokens of a window at first
    long: int = 2048  # tokens of a window for the last share ``tail`` of the steps
    tail: float = 0.12
    fall: float = 0.25
    rate: float = 3e-3
    rise: int = 100  # steps
    balance: float = 0.005  # weight of the loss that balances experts
    check: int = 50_000  # tokens of each held-out text that are scored

    def settled(self, step: int, elapsed: float) -> Plan:
        """Return the plan with its number of steps once the time ``elapsed`` (s) decides it."""
        if self.steps is not None or elapsed < self.seconds * (1 - self.fall):
            return self
        return replace(self, steps=math.ceil(step / (1 - self.fall)))

    def share(self, step: int) -> float:
        """Return the share of ``rate`` that is the learning rate at a step."""
        left = math.inf if self.steps is None else (self.steps - step) / (self.steps * self.fall)
        return min(1.0, (step + 1) / self.rise, left)

    def window(self, step: int) -> int:
        """Return the tokens of a window at a step."""
        late = self.steps is not None and step >= self.steps * (1 - self.tail)
        return self.long if late else self.short


def train(
    shape: str, texts: list[Text], held: list[Text], plan: Plan, seed: int, **smaller: int
) -> tuple[Any, Any, dict[str, Any]]:
    """Train a model; return it in bfloat16, its tokenizer, and the record of the training."""
    begin = time.monotonic()
    torch.manual_seed(seed)
    draw = np.random.default_rng(seed)
    config = make_config(shape, **smaller)
    tokenizer = make_tokenizer(texts, config.vocab_size)
    streams = [encode(tokenizer, text.train) for text in texts]
    for text, stream in zip(texts, streams, strict=True):
        if len(stream) < plan.long:
            raise SystemExit(
                f"error: {text.name}: {len(stream)} tokens are left to train on; "
                f"at least one window of {plan.long} was expected"
            )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("grouped_mm")
    count = sum(p.numel() for p in model.parameters())
    sizes = ", ".join(f"{t.name} {len(s):,}" for t, s in zip(texts, streams, strict=True))
    say(f"{shape}: {count:,} parameters; tokens: {sizes}")

    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=plan.rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    model.train()
    recent: list[float] = []
    step = 0
    while plan.steps is None or step < plan.steps:
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * plan.share(step)
        batch = draw_batch(streams, plan.window(step), plan.tokens, draw)  # [windows, window]
        out = model(batch, output_router_logits=True, use_cache=False)
        loss = torch.nn.functional.cross_entropy(
            out.logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
        )
        (loss + plan.balance * imbalance(out.router_logits, config)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.item())
        step += 1
        elapsed = time.monotonic() - begin
        plan = plan.settled(step, elapsed)
        if step % 50 == 0 or step == plan.steps:
            say(
                f"step {step}/{plan.steps or '?'}  loss {np.mean(recent):.3f}  "
                f"{step * plan.tokens / elapsed:,.0f} tokens/s  {elapsed:,.0f} s"
            )
            recent.clear()

    model.to(torch.bfloat16).float()  # the saved weights, in a type that is quicker to score
    record = {
        "shape": shape,
        "plan": {key: value for key, value in asdict(plan).items() if key != "seconds"},
        "tokens": step * plan.tokens,
        "seed": seed,
        "threads": torch.get_num_threads(),
        "seconds": round(time.monotonic() - begin),
        "texts": {
            t.name: {"sha256": t.digest, "train_tokens": len(s), "dropped": round(t.dropped, 4)}
            for t, s in zip(texts, streams, strict=True)
        },
        "left_out": {t.name: {"sha256": t.digest} for t in held},
        "held_out_bits_per_byte": {t.name: score(model, tokenizer, t, plan) for t in texts + held},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    return model, tokenizer, record


def make_config(shape: str, **smaller: int) -> Any:
    """Return the config of a shape; ``smaller`` replaces some of its numbers."""
    if shape == "deepseek":
        from crisp.checkpoint.deepseek import register

        register()
    return transformers.AutoConfig.for_model(shape, **{**COMMON, **SHAPES[shape], **smaller})


def imbalance(router_logits: tuple[torch.Tensor, ...], config: Any) -> torch.Tensor:
    """Return the mean over layers of experts * sum(share of choices * mean probability).

    It is 1 when experts are used evenly (Switch Transformer, eq. 4). transformers' own loss pools
    the layers, so that one layer's imbalance could hide behind another's. router_logits: of each
    layer [tokens, experts].
    """
    losses = []
    for logits in router_logits:
        probability = logits.float().softmax(-1)  # [tokens, experts]
        chosen = probability.topk(config.num_experts_per_tok, -1).indices.flatten()
        share = torch.bincount(chosen, minlength=logits.shape[-1]) / chosen.numel()
        losses.append(logits.shape[-1] * (share * probability.mean(0)).sum())
    return torch.stack(losses).mean()


@torch.no_grad()
def score(model: Any, tokenizer: Any, text: Text, plan: Plan) -> float:
    """Return bits per byte of the start of a held-out text, cut into windows of ``plan.long``."""
    model.eval()
    tokens = encode(tokenizer, text.held)[: plan.check]
    bits, n_bytes = 0.0, 0
    for start in range(0, len(tokens), plan.long):
        window = torch.from_numpy(tokens[start : start + plan.long])[None]
        if window.shape[1] < 2:
            continue
        logits = model(window).logits[0, :-1].float()
        bits += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
        n_bytes += len(tokenizer.decode(window[0, 1:], skip_special_tokens=True).encode())
    result = bits / math.log(2) / max(1, n_bytes)
    say(f"held out, {text.name}: {result:.3f} bits per byte")
    return round(result, 4)


def save(model: Any, tokenizer: Any, record: dict[str, Any], out: Path) -> None:
    """Save everything to the folder ``out``, which appears when it is complete."""
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        record = {**record, "model.safetensors": weights}
        (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
        folder.chmod(0o755)
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder)
        raise


def say(line: str) -> None:
    """Print a line of progress."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path, help="a folder that is not there yet")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="further training text")
    parser.add_argument("--leave-out", type=Path, nargs="+", default=[], help="never trained on")
    parser.add_argument("--minutes", type=float, default=50.0, help="about how long (default 50)")
    parser.add_argument("--steps", type=int, help="in place of --minutes, to repeat a training")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.out.exists() or not options.out.resolve().parent.is_dir():
        parser.error(f"{options.out}: a new folder in one that exists was expected")
    for path in [*options.text, *options.leave_out]:
        if not path.is_file():
            parser.error(f"{path}: is no file; a text was expected")
    names = ["code", "docs", *map(kind, options.text)]
    if len(set(names)) < len(names):
        parser.error(f"--text: the kinds {', '.join(names)} were expected to have different names")
    if options.threads:
        torch.set_num_threads(options.threads)
    texts, held = corpus(options.text, options.leave_out)
    for text in texts:
        size = sum(map(len, text.train))
        say(f"{text.name}: {size:,} characters to train on; {text.dropped:.1%} stood in held out")
    plan = Plan(steps=options.steps, seconds=60 * options.minutes)
    model, tokenizer, record = train(options.shape, texts, held, plan, options.seed)
    save(model, tokenizer, record, options.out.resolve())


if __name__ == "__main__":
    main()
