"""What a model takes beside its experts while it writes, and the budget that this leaves."""

from __future__ import annotations

from pathlib import Path

from crisp.checkpoint.files import open_checkpoint
from crisp.checkpoint.geometry.skeleton import default_config
from crisp.checkpoint.geometry.tensors import skeleton_bytes
from crisp.checkpoint.source import find_model
from crisp.hw.budget import (
    RunNeeds,
    auto_budget,
    describe_budget,
    kv_cache_bytes,
    largest_budget,
    plan_memory,
    run_needs,
)
from crisp.hw.model.resident import ResidentModel
from crisp.hw.store.reader import Store
from crisp.model.config import read_json
from crisp.model.fields import Fields
from crisp.model.layouts import text_fields
from crisp.policy import Budget, Policy


def generation_budget(
    model: ResidentModel,
    policy: Policy,
    prompt: int,
    new: int,
    chunk: int | str,
    threads: int = 1,
) -> tuple[Budget, str]:
    """Return the largest safe budget for a loaded model, and a line that says so.

    prompt, new: tokens. chunk: rows, or whole. Raises CrispError if not one expert has room.
    """
    loaded, spec = model.loaded.model, model.store.spec
    config = loaded.config.get_text_config().to_dict()
    needs = run_needs(
        spec,
        [policy],
        chunk_rows(prompt, chunk),
        skeleton=model.mapped,
        kv_cache=kv_cache_bytes(config, prompt + new, loaded.dtype.itemsize),
        threads=threads,
    )
    budget, plan = auto_budget(spec, [policy], needs)
    return budget, describe_budget(spec, budget, plan)


def check_room(folder: Path, store: Store, policy: Policy, new: int, threads: int) -> None:
    """Raise CrispError if it is clear before anything is loaded that not one expert will fit."""
    needs = foreseen_needs(folder, store, policy, 1, new, 1, threads)
    largest_budget(store.spec, policy.cache, plan_memory(needs))


def foreseen_needs(
    folder: Path,
    store: Store,
    policy: Policy,
    prompt: int,
    new: int,
    chunk: int | str,
    threads: int = 1,
) -> RunNeeds:
    """Return what the model in a folder will take; nothing of it is loaded.

    Arguments as of `generation_budget`. Raises CrispError for a folder that is not understood.
    """
    folder = find_model(folder).folder
    tensors = open_checkpoint(folder).tensors.values()
    config = read_json(folder / "config.json")
    known = default_config(config) or text_fields(Fields(str(folder), config)).values
    kind = str(known.get("dtype") or known.get("torch_dtype") or config.get("dtype"))
    return run_needs(
        store.spec,
        [policy],
        chunk_rows(prompt, chunk),
        skeleton=skeleton_bytes(tensors),
        kv_cache=kv_cache_bytes(known, prompt + new, 4 if kind.endswith("float32") else 2),
        threads=threads,
        checkpoint=sum(tensor.nbytes for tensor in tensors),
    )


def chunk_rows(prompt: int, chunk: int | str) -> int:
    """Return the rows of a prompt's largest step.

    >>> chunk_rows(700, 512), chunk_rows(700, "whole"), chunk_rows(3, 512)
    (512, 700, 3)
    """
    return max(1, min(prompt, chunk) if isinstance(chunk, int) else prompt)
