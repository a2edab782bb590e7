"""The fields of a Hugging Face config, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crisp.errors import CrispError

MOST = 1_000_000_000  # no size of a model is larger
MOST_LAYERS = 10_000
DTYPE_BITS = {"bfloat16": 16, "float16": 16, "float32": 32}


@dataclass(frozen=True)
class Fields:
    """The fields of a config, checked as they are read; errors name the file and the key."""

    where: str
    values: Mapping[str, object]

    def wrong(self, key: str, expected: str) -> CrispError:
        """Return the error for the value of `key`, or for its absence."""
        value = repr(self.values[key]) if key in self.values else "nothing"
        return CrispError(f"{self.where}: {key}: found {value}, expected {expected}")

    def has(self, key: str) -> bool:
        """Return whether there is a value that is not null."""
        return self.values.get(key) is not None

    def first(self, keys: Sequence[str]) -> str | None:
        """Return the first of several names of one field that has a value; None: none has."""
        return next((key for key in keys if self.has(key)), None)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number from `least` to a billion; absent or null means `default`, if there
        is one.
        """
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(key, f"a whole number of at least {least}")
        if value > MOST:
            raise self.wrong(key, f"a whole number of at most {MOST:,}")
        return value

    def layer_count(self, key: str) -> int:
        """Return a number of layers, for each of which something is kept."""
        value = self.count(key)
        if value > MOST_LAYERS:
            raise self.wrong(key, f"at most {MOST_LAYERS:,} layers")
        return value

    def one_count(self, key: str) -> int:
        """Return a whole number that may stand in a list for all layers, the same for each."""
        value = self.values.get(key)
        if isinstance(value, list) and value and all(x == value[0] for x in value):
            return Fields(self.where, {key: value[0]}).count(key)
        if isinstance(value, list):
            raise self.wrong(key, "one number for all layers")
        return self.count(key)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false; absent or null means `default`."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def layers(self, key: str) -> frozenset[int]:
        """Return the layer numbers in a list; absent or null means none."""
        value = self.values.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(type(layer) is int for layer in value):
            raise self.wrong(key, "a list of layer numbers")
        return frozenset(value)

    def words(self, key: str) -> list[str]:
        """Return a list of text; absent or null means an empty one."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.wrong(key, "a list of names")
        return value

    def sides(self, key: str) -> tuple[int, int] | None:
        """Return the rows and columns of a block; None: absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(type(n) is int and n > 0 for n in value)
        ):
            raise self.wrong(key, "two positive whole numbers")
        return value[0], value[1]

    def section(self, key: str) -> Fields | None:
        """Return the fields of a nested table; None: there is none, or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return None if value is None else Fields(f"{self.where}: {key}", value)

    def dtype_bits(self) -> int:
        """Return the bits of the published dtype; 16, the usual ones, where it names none."""
        key = "dtype" if self.has("dtype") else "torch_dtype"
        if not self.has(key):
            return 16
        name = str(self.values[key]).removeprefix("torch.")
        if name not in DTYPE_BITS:
            raise self.wrong(key, " or ".join(DTYPE_BITS))
        return DTYPE_BITS[name]
