"""The hardware profiles that come with the simulator, by name, and a user's own, by path."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from crisp.errors import unknown_name
from crisp.files import check_path
from crisp.hardware.profile import HardwareProfile


def hardware_profile_names() -> list[str]:
    """Return the names of the shipped profiles, in alphabetical order."""
    files = (Path(entry.name) for entry in (resources.files("crisp.sim") / "profiles").iterdir())
    return sorted(file.stem for file in files if file.suffix == ".toml")


def hardware_profile(name_or_path: str | Path | HardwareProfile) -> HardwareProfile:
    """Return a shipped profile by its name, a user's file by its path, or a profile as it is.

    Raises CrispError with the nearest name when it is neither, and for a file that is not a valid
    profile.
    """
    if isinstance(name_or_path, HardwareProfile):
        return name_or_path
    check_path(name_or_path, "hardware profile")
    name, shipped_names = str(name_or_path), hardware_profile_names()
    if name in shipped_names:
        shipped = resources.files("crisp.sim") / "profiles" / f"{name}.toml"
        with resources.as_file(shipped) as path:
            return HardwareProfile.load(path)
    if name.endswith(".toml") or Path(name).exists():
        return HardwareProfile.load(name)
    raise unknown_name(name, shipped_names, "hardware profile")
