"""A geometry that is stated by hand, in a TOML file.

    name = "my-moe"              # default: the file's name
    layers = 48
    moe_layers = [1, 2, 3]       # default: all of them
    experts = 128                # routed ones, of a layer
    top_k = 8
    d_model = 2048               # what goes into an expert
    d_ff = 768                   # neurons of an expert
    gate = true                  # default; false: two matrices an expert
    biases = false               # default; true: per-neuron biases of gate and up
    bits = 4.25                  # stored, of a routed weight, scales included; or one for each
                                 # MoE layer; default: dtype_bits
    dtype_bits = 16              # default; of everything else
    dense_params = 19140864      # what a token reads beside the routed experts, in a layer; or one
                                 # for each layer
    block = 96                   # default: an eighth of d_ff, rounded up to a multiple of 16

A quantity that the file leaves out and that has no default is asked for by name.
"""

from __future__ import annotations

import tomllib
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from crisp.errors import CrispError, reason_of, shorten, unknown_name
from crisp.files import check_readable

KEYS = (
    "name", "layers", "moe_layers", "experts", "top_k", "d_model", "d_ff", "gate", "biases", "bits",
    "dtype_bits", "dense_params", "block",
)  # fmt: skip
_LARGEST = 10**15


def read_by_hand(path: Path) -> dict[str, Any]:
    """Return the fields of a `ModelSpec` in a TOML file; CrispError names file and key."""
    check_readable(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
    except OSError as error:
        raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CrispError(f"{path}: is not TOML: {reason_of(error)}") from error
    for key in content:
        if key not in KEYS:
            raise CrispError(f"{path}: {unknown_name(key, KEYS, 'key')}")

    def wrong(key: str, expected: str) -> CrispError:
        value = shorten(repr(content[key])) if key in content else "nothing"
        return CrispError(f"{path}: {key}: found {value}, expected {expected}")

    def count(key: str, default: int | None = None) -> int:
        value = content.get(key, default)
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise wrong(key, "a whole number of at least 1")
        return value

    def flag(key: str, default: bool) -> bool:
        if not isinstance(content.get(key, default), bool):
            raise wrong(key, "true or false")
        return bool(content.get(key, default))

    def counts(key: str, expected: str) -> list[int]:
        values = content.get(key)
        if not isinstance(values, list) or not all(
            type(value) is int and 0 <= value <= _LARGEST for value in values
        ):
            raise wrong(key, expected)
        return values

    def bits(value: object) -> Fraction:
        if isinstance(value, bool) or not isinstance(value, int | Decimal):
            raise wrong("bits", "a number above 0, or one for each MoE layer")
        number = Decimal(value)
        if not number.is_finite() or abs(number.adjusted()) > 9 or number <= 0:
            raise wrong("bits", "a number above 0, or one for each MoE layer")
        return Fraction(number)

    n_layers, d_ff = count("layers"), count("d_ff")
    if n_layers > 10**5:
        raise wrong("layers", "at most 100,000")
    layers = tuple(range(n_layers))
    if "moe_layers" in content:
        layers = tuple(counts("moe_layers", "a list of layer numbers"))
    beside = f"a whole number, or a list of {n_layers}"
    if isinstance(content.get("dense_params"), list):
        dense = counts("dense_params", beside)
    else:
        dense = counts_of_one(content, wrong, beside) * n_layers
    dtype_bits = count("dtype_bits", 16)
    stored = content.get("bits", dtype_bits)
    each = [bits(value) for value in (stored if isinstance(stored, list) else [stored])]
    if isinstance(stored, list) and len(each) != len(layers):
        raise wrong("bits", f"{len(layers)} numbers, one for each MoE layer")
    name = content.get("name", path.stem)
    if not isinstance(name, str) or not name.strip():
        raise wrong("name", "a name")
    return {
        "name": name,
        "n_layers": n_layers,
        "moe_layers": layers,
        "n_experts": count("experts"),
        "top_k": count("top_k"),
        "d_model": count("d_model"),
        "d_ff": d_ff,
        "dtype_bits": dtype_bits,
        "bits": Fraction(sum(each), len(each)) if each else Fraction(0),
        "matrices": 3 if flag("gate", True) else 2,
        "biases": flag("biases", False),
        "dense_params": tuple(dense),
        "block": count("block", -(-d_ff // 128) * 16),
        "config_hash": None,
        "layer_bits": tuple(each) if len(set(each)) > 1 else None,
    }


def counts_of_one(content: dict[str, Any], wrong: Any, expected: str) -> list[int]:
    """Return the one number of parameters beside the experts, in a list."""
    value = content.get("dense_params")
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise wrong("dense_params", expected)
    return [value]
