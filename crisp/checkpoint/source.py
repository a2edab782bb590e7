"""Where a model is: a folder, or the snapshot of a repository of the Hugging Face hub.

A name on the hub, the snapshot's folder in the cache and a folder that it links to all mean the
same model, and it is called by the hub's name.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crisp.errors import CrispError, shorten
from crisp.extras import import_extra

_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[^/]+)$")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")


@dataclass(frozen=True)
class ModelSource:
    """A model's folder, and what it is called."""

    folder: Path
    name: str  # of the folder, or on the hub
    revision: str | None  # of the hub's repository

    @classmethod
    def of_folder(cls, folder: Path) -> ModelSource:
        """Return the source of a folder, which may be a snapshot in the hub's cache."""
        for path in (Path(os.path.abspath(folder)), folder.resolve()):  # noqa: PTH100 -- links stay
            found = _SNAPSHOT.search(path.as_posix())
            if found is not None:
                return cls(folder, f"{found['owner']}/{found['name']}", found["revision"])
        return cls(folder, folder.resolve().name, None)


def find_model(name: str | Path, *, download: bool = True) -> ModelSource:
    """Return where the model of that name is: a folder, else a repository of the hub.

    download: ask the hub for what is not in its cache. Raises CrispError for a name that is
    nowhere.
    """
    folder, name = Path(name), str(name)
    if folder.is_dir():
        return ModelSource.of_folder(main_snapshot(folder) or folder)
    if folder.exists() or not _is_hub_name(name):
        raise CrispError(
            f"{shorten(name)}: is no folder; one with a transformers checkpoint was expected"
        )
    cached = cached_snapshot(name)
    if not download or (cached is not None and _complete(cached)):
        if cached is None:
            raise CrispError(f"{name}: is no folder, and not in the cache of the Hugging Face hub")
        return ModelSource.of_folder(cached)
    return ModelSource.of_folder(_download(name))


def _is_hub_name(name: str) -> bool:
    """Return whether a name can be one on the hub, and is not a path whose folder is there."""
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name).parent.is_dir()


def hub_cache() -> Path:
    """Return the folder of the hub's cache, as its own library finds it."""
    for variable, inside in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
    ):
        value = os.environ.get(variable)
        if value:
            return Path(value).expanduser() / inside
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface/hub"


def cached_snapshot(name: str) -> Path | None:
    """Return the snapshot of a repository's main branch in the hub's cache; None: there is none."""
    return main_snapshot(hub_cache() / f"models--{name.replace('/', '--')}")


def local_model(name: str | Path) -> Path:
    """Return where on this machine the model of that name is; the name as a path if it is nowhere.

    A folder of a repository in the hub's cache, and a name that is there, mean the snapshot of the
    main branch.
    """
    path = Path(name)
    return (main_snapshot(path) if path.exists() else cached_snapshot(str(name))) or path


def main_snapshot(repository: Path) -> Path | None:
    """Return the snapshot of the main branch in a repository's folder of the hub's cache.

    None for any other folder, and for a snapshot without a model.
    """
    reference = repository / "refs" / "main"
    try:
        revision = reference.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    snapshot = repository / "snapshots" / revision
    if not revision or not snapshot.is_dir():
        return None
    whole = (snapshot / "config.json").exists() or any(snapshot.glob("*.gguf"))
    return snapshot if whole else None


def _complete(snapshot: Path) -> bool:
    """Return whether a snapshot seems to have weights, so that the hub need not be asked."""
    weights = any(any(snapshot.glob(kind)) for kind in ("*.safetensors", "*.gguf"))
    return weights or os.environ.get("HF_HUB_OFFLINE", "0") not in (
        "", "0",
    )  # fmt: skip


def _download(name: str) -> Path:
    hub: Any = import_extra("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(WANTED)))
    except Exception as error:  # of the network, the hub's answers, the disk: no common base
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CrispError(
            f"{name}: cannot be used (no folder; asked the hub): {reason[:160]}"
        ) from error
