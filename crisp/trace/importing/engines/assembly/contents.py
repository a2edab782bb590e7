"""What a file holds that no engine's reader recognises: a line for its user."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from crisp.errors import CrispError, reason_of, shorten
from crisp.model.gguf_header import read_header
from crisp.trace.importing.engines.assembly import files

_MOST = 1 << 28  # bytes of a JSON file that is read to describe it
# entries, then of each the length of its name, and the name, of a tensor of a block
_OLD_IMATRIX = re.compile(rb"..\0\0.\0\0\0blk\.\d+\.[a-z_.]+", re.DOTALL)
_SHOWN = 4  # names of a list of them


def describe_file(path: Path) -> str:
    """Return what a file holds, by its first bytes and its ending.

    Raises CrispError for one that is empty, or not the whole file that its beginning promises.
    """
    with path.open("rb") as file:
        head = file.read(1 << 12)
    suffix = path.suffix.lower()
    if not head:
        raise CrispError(f"{path}: is empty")
    if head.startswith(files.NPY) or suffix == ".npy":
        return _describe(files.read_npy(path))
    if suffix == ".npz":
        return f"holds {_list(f'{k} ({_describe(v)})' for k, v in files.read_npz(path).items())}"
    if suffix in (".pt", ".pth"):
        return _describe(files.read_pt(path))
    if head.startswith(b"GGUF") or suffix == ".gguf":
        return f"is a GGUF file with {_list(read_header(path).tensors)}"
    if suffix == ".safetensors":
        return f"holds {_list(_tensor_names(path))}"
    if suffix == ".json" and path.stat().st_size < _MOST:
        return _describe(files.read_json(path))
    if _OLD_IMATRIX.match(head):
        return "is an importance matrix in llama.cpp's old format (newer ones are GGUF)"
    return "is text" if files.is_text(head) else "is no text"


def _describe(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, dict):
        return f"an object with {_list(map(str, value))}"
    if isinstance(value, list | tuple):
        inside = f", the first {_describe(value[0])}" if value else ""
        return f"a list of {len(value):,}{inside}"
    return shorten(json.dumps(value)) if isinstance(value, str) else type(value).__name__


def _list(names: Any) -> str:
    every = [shorten(name) for name in names]
    if not every:
        return "nothing"
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more


def _tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CrispError(f"{path}: not a whole safetensors file ({reason_of(error)})") from error
