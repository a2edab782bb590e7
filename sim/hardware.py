"""The hardware profiles that come with the simulator, by name, and a user's own, by path."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from crisp.errors import nearest
from crisp.hardware.profile import HardwareProfile


def names() -> list[str]:
    """Names of the shipped profiles, in alphabetical order."""
    files = (Path(entry.name) for entry in (resources.files("crisp.sim") / "profiles").iterdir())
    return sorted(file.stem for file in files if file.suffix == ".toml")


def profile(name_or_path: str | Path) -> HardwareProfile:
    """A shipped profile by its name, or a user's file by its path.

    Raises CrispError with the nearest name when it is neither, and for a file that is not a valid
    profile.
    """
    name, known = str(name_or_path), names()
    if name in known:
        shipped = resources.files("crisp.sim") / "profiles" / f"{name}.toml"
        with resources.as_file(shipped) as path:
            return HardwareProfile.load(path)
    if name.endswith(".toml") or Path(name).exists():
        return HardwareProfile.load(name)
    raise nearest(name, known, "hardware profile")
