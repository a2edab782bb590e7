"""Logs of vLLM: ``--enable-return-routed-experts``, and the statistics of its load balancer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crisp.errors import CrispError
from crisp.trace.importing.engines.arrays import Prompted, read_arrays, rows_of_arrays
from crisp.trace.importing.engines.assembly import files
from crisp.trace.importing.engines.assembly.counts import count_experts
from crisp.trace.importing.engines.assembly.rows import Ints, assemble
from crisp.trace.importing.engines.log import MOST_EXPERTS, EngineLog, ExpertCounts, KnownSizes

_LOADS = "eplb_load_stats"


def recognise(path: Path, head: bytes) -> bool:
    """Return whether the file is a response with routed experts, or load statistics."""
    return files.is_text(head) and (
        _LOADS.encode() in head
        or (b'"choices"' in head and b'routed_experts"' in head and b'"meta_info"' not in head)
        or b'"prompt_routed_experts"' in head
    )


def read(paths: Sequence[Path], sizes: KnownSizes) -> EngineLog | ExpertCounts:
    """Read responses (.json, .jsonl), arrays (.npz, .npy) or load statistics (.jsonl)."""
    if any(path.suffix in (".npz", ".npy", ".pt") for path in paths):
        return read_arrays(paths, sizes, "vllm")
    sequences: list[Prompted] = []
    for path in paths:
        values = list(_values(path))
        if values and all(value.get("record_type") for _, value in values):
            if len(paths) > 1:
                raise CrispError(f"{path}: load statistics; one file of them was expected")
            return _load_statistics(path, values)
        for name, value in values:
            sequences += _choices(value, name)
    if not sequences:
        raise CrispError(
            f"{paths[0]}: has no routed experts; vllm serve --enable-return-routed-experts logs "
            "them"
        )
    rows, notes = rows_of_arrays(sequences, str(paths[0]))
    return assemble(rows, "vllm", paths[0], sizes, notes)


def _values(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file (one, a list, or one a line), with names for errors."""
    with path.open("rb") as file:
        first = file.readline().strip()
        lines = first.startswith(b"{") and first.endswith(b"}") and bool(file.read(1 << 12).strip())
    if lines:
        found = [(f"{path}: line {number}", value) for number, value in files.json_lines(path)]
    else:
        value = files.read_json(path)
        several = value if isinstance(value, list) else [value]
        found = [(f"{path}: response {n}", v) for n, v in enumerate(several)]
        found = found if len(found) > 1 else [(str(path), v) for _, v in found]
    for name, value in found:
        if not isinstance(value, dict):
            raise CrispError(f"{name}: not a JSON object")
        inner = value.get("response")  # of a file that the batch API wrote
        body = inner.get("body") if isinstance(inner, dict) else None
        yield name, body if isinstance(body, dict) else value


def _choices(response: dict[str, Any], name: str) -> list[Prompted]:
    """Return the routing of each choice of a response, its prompt's first."""
    usage = response.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    prompt_ids = response.get("prompt_token_ids")
    prompt = len(prompt_ids) if isinstance(prompt_ids, list) else usage.get("prompt_tokens")
    prompt = prompt if isinstance(prompt, int) and prompt >= 0 else None
    shared = response.get("prompt_routed_experts")
    choices = response.get("choices")
    if not isinstance(choices, list):
        raise CrispError(f"{name}: has no list 'choices'")
    found = []
    for number, choice in enumerate(choices):
        where = f"{name}: choice {number}"
        value = choice.get("routed_experts") if isinstance(choice, dict) else None
        if value is None and shared is None:
            continue
        parts: list[Ints] = []
        if shared is not None:
            parts.append(_experts(shared, f"{name}: prompt_routed_experts"))
        generated = None if value is None else _experts(value, f"{where}: routed_experts")
        if generated is not None:
            parts.append(generated)
        ids = choice.get("token_ids") if isinstance(choice, dict) else None
        completion = len(ids) if isinstance(ids, list) else None
        if completion is None and len(choices) == 1:
            completion = usage.get("completion_tokens")
        if shared is not None:
            found.append(Prompted(np.concatenate(_alike(parts, where)), len(parts[0])))
        elif generated is not None:
            found.append(_with_prompt(generated, prompt, completion, where))
    return found


def _experts(value: Any, name: str) -> Ints:
    return files.whole_array(value, 3, name) if value != [] else np.empty((0, 0, 0), np.int64)


def _alike(parts: list[Ints], name: str) -> list[Ints]:
    """Return the parts that are not empty; CrispError unless they have layers and k in common."""
    filled = [part for part in parts if part.size] or parts[:1]
    if len({part.shape[1:] for part in filled}) > 1:
        shapes = " and ".join(str(list(part.shape)) for part in filled)
        raise CrispError(f"{name}: routed experts are {shapes}; expected equal layers and k")
    return filled


def _with_prompt(experts: Ints, prompt: int | None, completion: Any, name: str) -> Prompted:
    """Return the rows of one array, which begins with the prompt or with the first new token."""
    if prompt is None:
        return Prompted(experts, None)
    if isinstance(completion, int) and len(experts) <= completion < prompt + completion - 1:
        return Prompted(experts, 0, first=prompt)
    if isinstance(completion, int) and len(experts) not in (
        prompt + completion - 1,
        prompt + completion,
    ):
        raise CrispError(
            f"{name}: routed_experts has {len(experts)} rows; expected "
            f"{prompt + completion - 1}, of {prompt} prompt and {completion} new tokens but the "
            "last"
        )
    return Prompted(experts, prompt)


def _load_statistics(path: Path, values: Sequence[tuple[str, dict[str, Any]]]) -> ExpertCounts:
    """Return the sum of all loads, of physical experts mapped back to the model's."""
    total: Ints | None = None
    for name, value in values:
        if value.get("record_type") != _LOADS:
            continue
        load = _whole_loads(value.get("expert_load"), f"{name}: expert_load")
        mapping = value.get("p2l_map")
        if mapping is not None:
            load = _to_logical(load, files.whole_array(mapping, 2, f"{name}: p2l_map"), name)
        if total is not None and total.shape != load.shape:
            raise CrispError(
                f"{name}: expert_load is {list(load.shape)}, before it was {list(total.shape)}"
            )
        total = load if total is None else total + load
    if total is None:
        raise CrispError(f"{path}: has no record of type {_LOADS}")
    return count_experts(
        "vllm",
        total,
        str(path),
        [
            "loads count prompt and new tokens alike, and may be multiplied by the data-parallel "
            "size: shares are used, not sizes"
        ],
    )


def _whole_loads(value: Any, name: str) -> Ints:
    array = files.to_array(value, name)
    if array.ndim != 2 or array.dtype.kind not in "iuf" or not array.size:
        raise CrispError(f"{name}: expected a list of loads for each layer")
    if array.dtype.kind == "f":
        array = np.round(np.where(np.isfinite(array), array, -1))
    if array.min() < 0 or array.max() > 1 << 53:
        raise CrispError(f"{name}: a load is negative or no number")
    return array.astype(np.int64)


def _to_logical(load: Ints, mapping: Ints, name: str) -> Ints:
    """Return loads [layers, experts] of loads [layers, places], by the expert in each place."""
    if load.shape != mapping.shape:
        raise CrispError(
            f"{name}: expert_load is {list(load.shape)}, p2l_map {list(mapping.shape)}; expected "
            "the same"
        )
    if mapping.max() >= MOST_EXPERTS:
        raise CrispError(f"{name}: p2l_map has expert {mapping.max()}")
    logical = np.zeros((len(load), int(mapping.max()) + 1), np.int64)
    held = mapping >= 0  # -1: nothing is in that place
    layer = np.nonzero(held)[0]
    np.add.at(logical, (layer, mapping[held]), load[held])
    return logical
