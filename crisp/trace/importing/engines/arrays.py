"""Arrays of expert ids [tokens, layers, k], saved by hand: .npy, .npz, .pt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crisp.errors import CrispError
from crisp.trace.importing.engines.assembly import files
from crisp.trace.importing.engines.assembly.rows import (
    Ints,
    LoggedRows,
    assemble,
    blank_equal_ids,
    phases,
)
from crisp.trace.importing.engines.log import EngineLog, KnownSizes

_PROMPT, _GENERATED = "prompt_routed_experts", "routed_experts"
_SUFFIXES = (".npy", ".npz", ".pt", ".pth")


@dataclass(frozen=True, eq=False)
class Prompted:
    """The routing of one sequence in order, prompt first."""

    experts: Ints  # [rows, layers, k]
    prompt: int | None  # rows that are of the prompt; None: not known
    first: int = 0  # the position of the first row


def rows_of_arrays(sequences: Sequence[Prompted], name: str) -> tuple[LoggedRows, list[str]]:
    """Return the rows of all sequences, k equal ids of a layer taken as not captured, and notes.

    Raises CrispError unless they have layers and k in common.
    """
    shapes = {sequence.experts.shape[1:] for sequence in sequences if sequence.experts.size}
    if len(shapes) != 1:
        found = " and ".join(str(list(shape)) for shape in sorted(shapes)) or "none"
        raise CrispError(f"{name}: layers and k differ between sequences, or are 0: {found}")
    filled = [sequence for sequence in sequences if sequence.experts.size]
    experts, blank = blank_equal_ids(np.concatenate([s.experts for s in filled]))
    positions = [s.first + np.arange(len(s.experts)) for s in filled]
    notes = []
    if blank:
        notes.append(f"{blank:,} rows of equal ids in all layers: the engine did not capture them")
    unknown = sum(sequence.prompt is None for sequence in filled)
    if unknown:
        of = "" if unknown == len(filled) else f" of {unknown} sequences"
        notes.append(f"no phases{of}: all taken as decode")
    rows = LoggedRows(
        experts=experts,
        sequence=np.repeat(np.arange(len(filled)), [len(s.experts) for s in filled]),
        position=np.concatenate(positions),
        phase=np.concatenate(
            [
                phases(position, s.first + (s.prompt or 0))
                for position, s in zip(positions, filled, strict=True)
            ]
        ),
    )
    return rows, notes


def recognise(path: Path, head: bytes) -> bool:
    """Return whether the file is a .npy, .npz or .pt with arrays [tokens, layers, k] of ids."""
    return path.suffix in _SUFFIXES and holds_ids(path, head)


def holds_ids(path: Path, head: bytes) -> bool:
    """Return whether a .npy, .npz or .pt holds whole numbers in three dimensions that are ids.

    The ids of a row are distinct, or all equal where nothing was captured; counts are not.
    """
    try:
        arrays = _arrays(path)
    except CrispError:
        return False
    return bool(arrays) and all(
        array.ndim == 3 and array.dtype.kind in "iu" and looks_like_ids(array)
        for array in arrays.values()
    )


def looks_like_ids(array: Any) -> bool:
    """Return whether whole numbers [n, layers, k] are ids: distinct in a row, or all equal."""
    some = np.sort(np.asarray(array[:256]), axis=2)
    repeated = ((some[..., 1:] == some[..., :-1]) & (some[..., 1:] >= 0)).any(axis=2)
    equal = (some == some[..., :1]).all(axis=2)
    return not bool((repeated & ~equal).any())


def read(paths: Sequence[Path], sizes: KnownSizes) -> EngineLog:
    """Read arrays [tokens, layers, k], each a sequence."""
    return read_arrays(paths, sizes, "array")


def read_arrays(paths: Sequence[Path], sizes: KnownSizes, engine: str) -> EngineLog:
    """Read files of arrays [tokens, layers, k], each a sequence.

    In an .npz, ``prompt_routed_experts`` goes before ``routed_experts`` as its prompt.
    """
    sequences: list[Prompted] = []
    for path in paths:
        arrays = {
            name: files.whole_array(array, 3, f"{path}: {name}" if name else str(path))
            for name, array in _arrays(path).items()
        }
        if _PROMPT in arrays:
            prompt = arrays.pop(_PROMPT)
            generated = arrays.pop(_GENERATED, prompt[:0])
            if generated.size and generated.shape[1:] != prompt.shape[1:]:
                raise CrispError(
                    f"{path}: {_PROMPT} is {list(prompt.shape)}, {_GENERATED} "
                    f"{list(generated.shape)}; expected equal layers and k"
                )
            parts = [part for part in (prompt, generated) if part.size] or [prompt]
            sequences.append(Prompted(np.concatenate(parts), len(prompt)))
        sequences += [Prompted(array, None) for array in arrays.values()]
    rows, notes = rows_of_arrays(sequences, str(paths[0]))
    return assemble(rows, engine, paths[0], sizes, notes)


def _arrays(path: Path) -> dict[str, Any]:
    """Return the arrays of a file by name; the name is empty where there is just one."""
    with path.open("rb") as file:
        head = file.read(8)
    if head.startswith(files.NPY):
        return {"": files.read_npy(path)}
    if path.suffix == ".npz":
        return dict(files.read_npz(path))
    if path.suffix not in (".pt", ".pth"):
        raise CrispError(f"{path}: not an array; expected {', '.join(_SUFFIXES)}")
    value = files.read_pt(path)
    if hasattr(value, "detach"):
        return {"": files.to_array(value, str(path))}
    named = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else ()
    )
    arrays = {str(key): item for key, item in named if hasattr(item, "detach")}
    if not arrays:
        raise CrispError(f"{path}: holds no array [tokens, layers, k]")
    return {key: files.to_array(item, f"{path}: {key}") for key, item in arrays.items()}
