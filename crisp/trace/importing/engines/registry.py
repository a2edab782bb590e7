"""The engines whose logs are read, by name, and the recognition of a log by its content."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crisp.errors import CrispError, unknown_name
from crisp.files import check_readable
from crisp.trace.importing.engines import (
    arrays,
    bigmoeonedge,
    cache_eval,
    colibri,
    llamacpp,
    policylang,
    sglang,
    tensors,
    vllm,
)
from crisp.trace.importing.engines.assembly.contents import describe_file
from crisp.trace.importing.engines.log import EngineLog, ExpertCounts, KnownSizes, check_sizes

Read = Callable[[Sequence[Path], KnownSizes], EngineLog | ExpertCounts]


@dataclass(frozen=True)
class EngineReader:
    """How the logs of one engine are told from others, and read.

    ``reads``: the endings of such files, each with what is in them.
    ``recognise(path, head)``: whether a file is such a log, by its first 64 KiB; never raises.
    ``read(paths, sizes)``: the log in these files; CrispError, one line, for one that is broken or
    lacks what nobody told it.
    """

    reads: Mapping[str, str]
    recognise: Callable[[Path, bytes], bool]
    read: Read


# In the order in which a file is held against them: the surest first.
ENGINES: dict[str, EngineReader] = {
    "bigmoeonedge": EngineReader(
        {".csv": "a route trace with a # preamble"}, bigmoeonedge.recognise, bigmoeonedge.read
    ),
    "vllm": EngineReader(
        dict.fromkeys((".json", ".jsonl"), "choices with routed_experts"), vllm.recognise, vllm.read
    ),
    "sglang": EngineReader(
        {".json": "meta_info with routed_experts", ".pt": "an expert distribution"},
        sglang.recognise, sglang.read,
    ),
    "llama.cpp": EngineReader(
        {".csv": "a moe-trace", ".gguf": "an imatrix with counts"},
        llamacpp.recognise, llamacpp.read,
    ),
    "colibri": EngineReader(
        {".txt": "call row layer id:gate"}, colibri.recognise, colibri.read
    ),
    "moe-policylang": EngineReader(
        dict.fromkeys((".jsonl", ".parquet"), "what record_trace writes"),
        policylang.recognise, policylang.read,
    ),
    "moe-cache-eval": EngineReader(
        {".safetensors": "events", ".json": "manifest.json beside events", ".csv": "events"},
        cache_eval.recognise, cache_eval.read,
    ),
    "array": EngineReader(
        dict.fromkeys((".npy", ".npz", ".pt", ".pth"), "expert ids [tokens, layers, k]"),
        arrays.recognise, arrays.read,
    ),
    "moe-infinity": EngineReader(
        {".npy": "counts [sequences, layers, experts]"},
        tensors.recognise_counts, tensors.read_counts,
    ),
    "router-logits": EngineReader(
        dict.fromkeys((".npy", ".npz", ".pt", ".pth"), "floats [tokens, experts] of each layer"),
        tensors.recognise_logits, tensors.read_logits,
    ),
}  # fmt: skip

_HEAD = 1 << 16  # bytes looked at to recognise a file


def read_log(
    paths: Sequence[Path],
    engine: str | None = None,
    *,
    n_experts: int | None = None,
    n_layers: int | None = None,
    top_k: int | None = None,
) -> EngineLog | ExpertCounts:
    """Read the log that an engine left in ``paths``; engine: recognised by content if None.

    n_experts, n_layers, top_k: of the model, for logs that do not say. Raises CrispError for files
    that are unreadable, broken or not recognised, and for unknown engines.
    """
    for path in paths:
        if not path.exists():
            raise CrispError(f"{path}: no such file")
        check_readable(path)
    if engine is None:
        engine = recognise_log(paths[0])
        if engine is None:
            raise not_recognised(paths[0])
    check_sizes(n_experts, n_layers, top_k)
    if engine not in ENGINES:
        raise unknown_name(engine, ENGINES, "engine")
    return ENGINES[engine].read(paths, KnownSizes(n_experts, n_layers, top_k))


def not_recognised(path: Path) -> CrispError:
    """Return the error for a file that is no log that is known: what it holds, what was expected.

    Raises the error of the file's own format where it is broken.
    """
    found, suffix = describe_file(path), path.suffix.lower()
    known = [
        f"{name} ({reader.reads[suffix]})"
        for name, reader in ENGINES.items()
        if suffix in reader.reads
    ]
    of = f"of {suffix} files these are read: " if known else "--from names its kind: "
    return CrispError(
        f"{path}: {found}; not recognised as a log; {of}{', '.join(known or ENGINES)}"
    )


def recognise_log(path: Path) -> str | None:
    """Return the engine whose log the file is, by its content; None if it is none that is known."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    for name, reader in ENGINES.items():
        if reader.recognise(path, head):
            return name
    return None
