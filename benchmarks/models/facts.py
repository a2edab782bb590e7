"""What must hold of a model that a command has worked with, each against transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from crisp.adapter import Experts, attach, expert_layout
from crisp.checkpoint.geometry.read import read_model
from crisp.checkpoint.library import auto_class, load_config
from crisp.hw import DeviceOptions, Store, generate, open_resident
from crisp.policy import Budget, named

BLOCK = 16
NEW = 6  # tokens that are written
PROMPT = "once upon a time"
ROUNDING = 1e-4  # of the largest logit: float32 in another order of summing, through a few layers
IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))


def load(folder: Path, dtype: Any = torch.float32) -> Any:
    """Load a model with transformers' own loop over experts."""
    auto = auto_class(load_config(folder))
    return auto.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def logits(model: Any) -> Any:
    """Return the logits of some text, without a cache."""
    with torch.no_grad():
        return model(IDS, use_cache=False).logits.double()


def differ(one: Any, other: Any) -> float:
    """Return the largest difference, as a share of the largest number."""
    return float((one - other).abs().max() / other.abs().max())


def widths_are_prefixes(folder: Path) -> str | None:
    """At full width the model is its own to the bit; at half width the other neurons are as zeros.

    Returns what is wrong, if anything is. Where the router's weight multiplies inputs transformers
    multiplies all tokens with all experts at once, so bits may differ.
    """
    model = load(folder)
    spec = read_model(folder).spec.with_(block=BLOCK)
    layout, whole = expert_layout(model), logits(model)
    with attach(model, named("lru"), spec=spec):
        full = logits(model)
    scaled = any(layer.scales_inputs for layer in layout.layers)
    if not (differ(full, whole) < ROUNDING if scaled else torch.equal(full, whole)):
        return f"at full width logits differ by {differ(full, whole):.0e}"
    with attach(model, named("up"), spec=spec):
        half = logits(model)
    neurons = spec.neurons(0, spec.width(1 / 2))  # type: ignore[arg-type]
    for experts in map(Experts.of, layout.layers):
        for expert in range(experts.n_experts):
            experts.neurons(expert)[1][neurons:] = 0
    cut = logits(model)
    if differ(half, cut) > ROUNDING or differ(half, whole) < 100 * ROUNDING:
        return f"at half width logits differ by {differ(half, cut):.0e}"
    return None


def prepared_is_the_same(folder: Path, prepared: Path) -> str | None:
    """In float64 the prepared model's logits are the original's within 1e-10.

    Within the rounding of float32 where the family computes its logits in that.
    """
    one, other = (logits(load(path, torch.float64)) for path in (prepared, folder))
    rounded = torch.equal(other, other.float().double())
    difference = differ(one, other)
    if difference > (1e-5 if rounded else 1e-10):
        return f"prepared, its logits differ by {difference:.0e}"
    return None


def text_is_the_same(folder: Path, store: Path) -> str | None:
    """Tokens written from a store are those of the whole model, as far as rounding lets one say."""
    model, seen = load(folder), list[Any]()
    resident = open_resident(folder, Store.open(store))
    ids = torch.tensor([resident.loaded.tokenizer(PROMPT)["input_ids"]])
    own = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW,
        eos_token_id=None, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    expected = own.sequences[0, ids.shape[1] :].tolist()
    hook = resident.loaded.model.register_forward_hook(
        lambda _, __, output: seen.append(output.logits[0, -1].double())
    )
    try:
        made = generate(resident, named("lru"), Budget.parse("30%"), DeviceOptions(), PROMPT, NEW)
    finally:
        hook.remove()
    for step, (token, other, row) in enumerate(zip(made.tokens, expected, seen, strict=False)):
        reference = own.logits[step][0].double()
        room = ROUNDING * float(reference.abs().max())
        if float((row - reference).abs().max()) > room:
            return f"from the store, logits of token {step} differ by {differ(row, reference):.0e}"
        first, second = reference.topk(2).values.tolist()
        if token != other:  # what follows another token says nothing
            return f"from the store, token {step} differs" if first - second > 2 * room else None
    return None
