"""A model's geometry together with what it was read from, and what was not taken as it stood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from crisp.model.config import read_config
from crisp.model.spec import BUILTIN, STORE_INDEX, ModelSpec

BITS_NOTE = "stored bits"  # how notes about them begin


@dataclass(frozen=True)
class ModelGeometry:
    """A geometry and its origin."""

    spec: ModelSpec
    source: str  # what it was read from, in words
    notes: tuple[str, ...] = ()  # where numbers are from that one would not expect

    def with_bits(self, bits: Fraction | None) -> ModelGeometry:
        """Return the same in other stored bits, which need no note; None: in its own."""
        if bits is None:
            return self
        notes = tuple(note for note in self.notes if not note.startswith(BITS_NOTE))
        return replace(self, spec=self.spec.with_(bits=bits), notes=notes)


ReadModel = Callable[[str | Path, Fraction | None], ModelGeometry]
"""``read(name or path, stored bits)``: see `read_named`."""


def read_named(name_or_path: str | Path, bits: Fraction | None = None) -> ModelGeometry:
    """Read a model's geometry by its name, or from a config, a store or a TOML file, and no other.

    bits: stored, of a routed weight, where they are given: they win. Raises CrispError with the
    nearest built-in name.
    """
    path = Path(name_or_path)
    if str(name_or_path) in BUILTIN:
        source = "a built-in model, from its published config"
    elif (path / STORE_INDEX).exists():
        source = "an expert store"
    elif path.suffix == ".toml":
        source = "a geometry stated by hand"
    elif path.exists():
        geometry, name = read_config(path, any_bits=bits is not None)
        spec = ModelSpec.from_geometry(geometry, name)
        return ModelGeometry(spec, "its config", geometry.notes).with_bits(bits)
    else:
        source = "nothing"  # the next line says so
    return ModelGeometry(ModelSpec.named(name_or_path), source).with_bits(bits)
