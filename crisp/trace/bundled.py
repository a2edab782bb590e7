"""The traces that come with the package."""

from __future__ import annotations

from pathlib import Path

from crisp.errors import CrispError, unknown_name

SUFFIX = ".trace.safetensors"


def bundled_traces() -> dict[str, Path]:
    """Return name -> file of every bundled trace, sorted by name.

    The wheel carries them inside the package; a checkout has them in its ``traces`` folder.
    """
    package = Path(__file__).resolve().parents[1]
    inside = package / "bundled_traces"
    folder = inside if inside.is_dir() else package.parent / "traces"
    return {path.name.removesuffix(SUFFIX): path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def resolve_trace(name_or_path: str | Path) -> Path:
    """Return the file at that path or, if there is none, the bundled trace of that name."""
    path = Path(name_or_path)
    if path.exists():
        return path
    traces = bundled_traces()
    if str(name_or_path) in traces:
        return traces[str(name_or_path)]
    if any(sign in str(name_or_path) for sign in "/."):  # no bundled name has any
        raise CrispError(f"{name_or_path}: no such file")
    raise unknown_name(str(name_or_path), traces, "trace")
