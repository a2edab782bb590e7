"""Try every command of `crisp` on a tiny random model of a family."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.models import facts, tiny
from crisp.adapter import Experts, expert_layout, find_activation
from crisp.cli.main import main
from crisp.errors import CrispError

COMMANDS = ("capture", "simulate", "eval", "prepare", "pack", "generate")
NO_EXPERTS = "has no routed experts"


@dataclass(frozen=True)
class Trial:
    """What became of a family: its layout in words, and of each command None or why not."""

    model_type: str
    layout: str
    refusals: dict[str, str] = field(default_factory=dict)
    untried: bool = False  # no tiny model of it could be made: a layout is that of its modules

    @property
    def complete(self) -> bool:
        """Whether every command works."""
        return not self.refusals and not self.untried


def try_family(model_type: str, folder: Path) -> Trial | None:
    """Try all commands on a tiny model made in ``folder``; None: the family has no experts."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    model, text = folder / "model", folder / "text.txt"
    words = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    text.write_text("".join(words.choices("abcdefghijklmnopqrstuvwxyz ", k=900)))
    if not tiny.has_experts(model_type):
        return None
    try:
        tiny.check_size(model_type)
        tiny.save_tiny(model_type, model)
        facts.logits(facts.load(model))
    except Exception:  # of any family's code: its fields depend on one another in ways of its own
        return _modules_alone(model_type)
    described = _describe_config(model_type, tiny.small_config(model_type))
    if described is None or not described.complete:
        return described
    layout = described.layout
    trace, prepared, store = folder / "trace.safetensors", folder / "prepared", folder / "store"
    read = ("--text", text, "--tokens", 256, "--window", 64, "--block", facts.BLOCK)
    budget = ("--policy", "lru", "--budget", "30%")
    lines: dict[str, tuple[Any, ...]] = {
        "capture": (
            "trace", "capture", model, "--text", text, "--out", trace, "--prompt-tokens", 16,
            "--new-tokens", 8, "--sequences", 4,
        ),
        "simulate": ("simulate", trace, "--model", model, *budget, "--phase", "all"),
        "eval": ("eval", model, "--policy", "up", *read),
        "prepare": ("prepare", model, *read, "--out", prepared),
        "pack": ("pack", model, "--out", store, "--block", facts.BLOCK),
        "generate": (
            "generate", model, "--store", store, *budget, "--prompt", facts.PROMPT,
            "--max-new-tokens", facts.NEW,
        ),
    }  # fmt: skip
    checks: dict[str, Callable[[], str | None]] = {
        "eval": lambda: facts.widths_are_prefixes(model),
        "prepare": lambda: facts.prepared_is_the_same(model, prepared),
        "generate": lambda: facts.text_is_the_same(model, store),
    }
    needed = {"simulate": "capture", "generate": "pack"}
    refusals: dict[str, str] = {}
    for command, line in lines.items():
        if needed.get(command) in refusals:
            refusals[command] = refusals[needed[command]]
            continue
        refused = call(*line) or checks.get(command, lambda: None)()
        if refused:
            refusals[command] = refused.replace(f"{folder}/", "")
    return Trial(model_type, layout, refusals)


def _modules_alone(model_type: str) -> Trial | None:
    """Say what a family's modules are like of which no tiny model runs; they have no weights."""
    for make in (tiny.small_config, lambda name: transformers.CONFIG_MAPPING[name]()):
        try:
            described = _describe_config(model_type, make(model_type))
        except Exception as error:  # of any family's code
            reason = " ".join(f"{type(error).__name__}: {error}".split())
        else:
            return None if described is None else replace(described, untried=True)
    reason = f"transformers makes no model of the family's own defaults ({reason})"
    return Trial(model_type, "", dict.fromkeys(COMMANDS, reason), untried=True)


def _describe_config(model_type: str, config: Any) -> Trial | None:
    """Return the layout of a config's model, or why it is refused; None: it has no experts."""
    with torch.device("meta"):
        empty = tiny.auto_of(config).from_config(config)
    try:
        return Trial(model_type, describe(empty))
    except CrispError as error:
        reason = str(error).partition(": ")[2]
        refused = dict.fromkeys(COMMANDS, reason)
        return None if NO_EXPERTS in reason else Trial(model_type, "", refused)


def call(*arguments: Any) -> str | None:
    """Run a command line in this process; return what it said if it failed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            return err.getvalue().strip().rpartition("error: ")[2] if end.code else None
    return None


def describe(model: Any) -> str:
    """Return in words how a model has its experts."""
    layout = expert_layout(model)
    layers = [layer.index for layer in layout.layers]
    experts = Experts.of(layout.layers[0])
    words = [str(find_activation(experts))]
    for holds, word in (
        (not experts.has_gate, "no gate"),
        (experts.has_bias, "biases"),
        (experts.transposed, "transposed"),
        (not experts.concatenated, "interleaved"),
        (experts.scales_inputs, "weights scale inputs"),
        (layout.layers[0].block is None, "on the layer itself"),
        (len(layers) < layout.n_layers and layers[0] > 0, "first layers dense"),
        (len(layers) < layers[-1] - layers[0] + 1, "not in every layer"),
    ):
        if holds:
            words.append(word)
    return ", ".join(words)
