"""The stored bits of a routed weight, group scales and zeros included, as a config says them.

A quantised checkpoint's config says the method, its bits and how many weights share a scale. Which
modules are quantised it says by patterns, so that layers may differ.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from crisp.errors import CrispError, shorten
from crisp.model import layouts
from crisp.model.fields import Fields

FP16 = 16
FP32 = 32
_AS_MIXTRAL = ("mixtral", "phimoe", "minimax", "minimax_m2")


@dataclass(frozen=True)
class Scheme:
    """How a matrix [out, in] is stored: bits of a weight, and what a group of weights shares.

    A group is `rows` x `columns` weights; None: the whole side. `shared`: bits of its scale, and of
    its zero point if it has one.
    """

    bits: Fraction
    rows: int | None
    columns: int | None
    shared: Fraction

    def size(self, out: int, inner: int) -> Fraction:
        """Return the bits of a matrix [out, inner]; the one scale of a whole matrix is nothing."""
        if self.rows is None and self.columns is None:
            return out * inner * self.bits
        groups = _groups(out, self.rows) * _groups(inner, self.columns)
        return out * inner * self.bits + groups * self.shared


@dataclass(frozen=True)
class StoredBits:
    """The stored bits of a weight in each MoE layer, and where they are from."""

    each: tuple[Fraction, ...]
    note: str | None  # None: they are those of the dtype


@dataclass(frozen=True)
class ExpertShape:
    """What the bits of an expert's weights depend on."""

    d_model: int
    d_ff: int
    matrices: int
    layers: tuple[int, ...]  # MoE layers
    model_type: str = ""  # says how its checkpoints spell the experts' names


SchemeOf = Callable[[str], Scheme | None]
"""How a module's weight is stored, by the module's name; None: in the published dtype."""


def stored_bits(f: Fields, dtype_bits: int, shape: ExpertShape) -> StoredBits:
    """Return the bits of one stored weight of a routed expert, its share of scales included.

    f: a config. Raises CrispError for a method that is not understood, naming `--bits`.
    """
    q = layouts.quantisation(f)
    if q is None:
        return StoredBits((Fraction(dtype_bits),) * len(shape.layers), None)
    method = str(q.values.get("quant_method") or "of no named method")
    if method not in _METHODS:
        raise CrispError(
            f"{q.where}: how many bits {method} stores a weight in is not known; --bits B says it"
        )
    scheme_of, words = _METHODS[method](q)
    try:
        each = tuple(_layer_bits(scheme_of, layer, dtype_bits, shape) for layer in shape.layers)
    except re.error as error:
        raise CrispError(
            f"{q.where}: {shorten(repr(error.pattern))} is no regular expression ({error.msg})"
        ) from error
    if set(each) == {Fraction(dtype_bits)}:
        words += "; the routed experts are not quantised"
    return StoredBits(each, f"stored bits: quantization_config, {words}")


def _layer_bits(scheme_of: SchemeOf, layer: int, dtype_bits: int, shape: ExpertShape) -> Fraction:
    """Return the bits of a weight in one layer, on average over an expert's matrices."""
    total = Fraction(0)
    plain = Scheme(Fraction(dtype_bits), None, None, Fraction(0))
    inside, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if shape.model_type in _AS_MIXTRAL:
        inside, names = "block_sparse_moe", ("w1", "w3", "w2")
    for name in names[3 - shape.matrices :]:
        scheme = scheme_of(f"model.layers.{layer}.{inside}.experts.0.{name}")
        down = name == names[-1]
        sides = (shape.d_model, shape.d_ff) if down else (shape.d_ff, shape.d_model)
        total += (scheme or plain).size(*sides)
    return total / (shape.matrices * shape.d_model * shape.d_ff)


def _groups(side: int, length: int | None) -> int:
    return 1 if length is None else -(-side // length)


# -- patterns of module names ---------------------------------------------------------------------


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern of a quantisation config means the module ``name``.

    It is a regular expression after ``re:``, else a name, a part of one between dots, or a glob.

    >>> [matches(p, "model.layers.0.mlp.experts.0.w1") for p in ("re:.*w1", "layers.0", "w")]
    [True, True, False]
    """
    if pattern.startswith("re:"):
        return _matches_expression(pattern[3:], name)
    if "*" in pattern:
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*{pattern}.*")
    return f".{pattern.strip('.')}." in f".{name}."


def _matches_expression(expression: str, name: str) -> bool:
    return re.match(expression, name) is not None


def _but(scheme: Scheme, skipped: Sequence[str]) -> SchemeOf:
    """Return the scheme for all modules but those that a pattern means."""
    return lambda name: None if any(matches(p, name) for p in skipped) else scheme


# -- methods ---------------------------------------------------------------------------------------


def _mxfp4(q: Fields) -> tuple[SchemeOf, str]:
    """4-bit numbers, an 8-bit scale for each 32: OCP Microscaling Formats v1.0, section 5."""
    scheme = Scheme(Fraction(4), 1, 32, Fraction(8))
    return _but(scheme, q.words("modules_to_not_convert")), "mxfp4: 8-bit scales of 32"


def _fp8(q: Fields) -> tuple[SchemeOf, str]:
    """8-bit floats with a 32-bit scale for each block, or for the whole matrix."""
    skipped = q.words("modules_to_not_convert") + q.words("ignored_layers")
    block = q.sides("weight_block_size")
    if block is None:
        return _but(Scheme(Fraction(8), None, None, Fraction(FP32)), skipped), (
            "fp8: a scale for each matrix"
        )
    scheme = Scheme(Fraction(8), *block, Fraction(FP32))
    return _but(scheme, skipped), f"fp8: scales of {block[0]} x {block[1]}"


def _gptq(q: Fields) -> tuple[SchemeOf, str]:
    """Integers; a group along the input shares a 16-bit scale and a zero point of their bits.

    `dynamic` (of GPTQModel) overrides both by module: "-:PATTERN" leaves it as it was.
    """
    overrides = q.section("dynamic")

    def scheme_of(name: str) -> Scheme | None:
        own = q
        for pattern, values in (overrides.values if overrides else {}).items():
            if not _matches_expression(pattern.removeprefix("+:").removeprefix("-:"), name):
                continue
            if pattern.startswith("-:"):
                return None
            if isinstance(values, Mapping):
                own = Fields(q.where, {**q.values, **values})
            break
        bits = own.count("bits")
        return _integers(own, bits, bits)

    return scheme_of, _describe_integers(str(q.values["quant_method"]), q, "bits")


def _awq(q: Fields) -> tuple[SchemeOf, str]:
    """Integers as GPTQ's; zero points are stored."""
    key = "bits" if q.has("bits") else "w_bit"
    q = Fields(q.where, {"group_size": q.values.get("q_group_size"), **q.values})
    bits = q.count(key)
    scheme = _integers(q, bits, bits if q.flag("zero_point", True) else 0)
    return _but(scheme, q.words("modules_to_not_convert")), _describe_integers("awq", q, key)


def _integers(q: Fields, bits: int, zero: int) -> Scheme:
    group = q.values.get("group_size")
    if group in (None, -1):
        return Scheme(Fraction(bits), 1, None, Fraction(FP16 + zero))
    return Scheme(Fraction(bits), 1, q.count("group_size"), Fraction(FP16 + zero))


def _describe_integers(method: str, q: Fields, key: str) -> str:
    group = q.values.get("group_size")
    shared = "a row" if group in (None, -1) else f"{group}"
    return f"{method}: {q.count(key)} bits, scales and zeros of {shared}"


def _bitsandbytes(q: Fields) -> tuple[SchemeOf, str]:
    """nf4 and fp4: a scale for each 64, quantised itself if nested; int8: one for each row."""
    skipped = q.words("llm_int8_skip_modules")
    if q.flag("load_in_4bit", False):
        nested = q.flag("bnb_4bit_use_double_quant", False)
        shared = 8 + Fraction(FP32, 256) if nested else Fraction(FP32)
        kind = q.values.get("bnb_4bit_quant_type") or "fp4"
        if kind not in ("nf4", "fp4"):
            raise q.wrong("bnb_4bit_quant_type", "nf4 or fp4")
        words = f"bitsandbytes: {kind}, scales of 64"
        return _but(Scheme(Fraction(4), 1, 64, shared), skipped), words + ", nested" * nested
    scheme = Scheme(Fraction(8), 1, None, Fraction(FP32))
    return _but(scheme, skipped), "bitsandbytes: int8, a scale for each row"


def _compressed_tensors(q: Fields) -> tuple[SchemeOf, str]:
    """Groups of modules, each with bits and a strategy; what no group targets is as it was."""
    groups = q.section("config_groups")
    if groups is None or not groups.values:
        raise q.wrong("config_groups", "groups of modules with their bits")
    schemes: list[tuple[list[str], Scheme]] = []
    words = []
    for key in groups.values:
        group = groups.section(key)
        weights = None if group is None else group.section("weights")
        if group is None or weights is None:
            continue
        scheme, how = _compressed(weights)
        schemes.append((group.words("targets"), scheme))
        words.append(how)
    ignored = q.words("ignore")

    def scheme_of(name: str) -> Scheme | None:
        if any(matches(pattern, name) for pattern in ignored):
            return None
        for targets, scheme in schemes:
            if "Linear" in targets or any(matches(target, name) for target in targets):
                return scheme
        return None

    return scheme_of, f"compressed-tensors: {'; '.join(dict.fromkeys(words))}"


def _compressed(w: Fields) -> tuple[Scheme, str]:
    """Return the scheme of one group of compressed-tensors, and the same in words."""
    bits, kind = w.count("num_bits"), str(w.values.get("type") or "int")
    zero = 0 if w.flag("symmetric", True) else bits
    shared = Fraction(FP16 + zero)
    strategy = str(w.values.get("strategy") or ("group" if w.has("group_size") else "tensor"))
    what = f"{bits}-bit {kind}s"
    if strategy == "tensor":
        return Scheme(Fraction(bits), None, None, shared), f"{what}, a scale for each matrix"
    if strategy == "channel":
        return Scheme(Fraction(bits), 1, None, shared), f"{what}, a scale for each row"
    if strategy == "block":
        block = w.sides("block_structure")
        if block is None:
            raise w.wrong("block_structure", "two positive whole numbers")
        return Scheme(Fraction(bits), *block, shared), (
            f"{what}, scales of {block[0]} x {block[1]}"
        )
    if strategy not in ("group", "tensor_group"):
        raise w.wrong("strategy", "tensor, channel, group, tensor_group or block")
    group = w.count("group_size")
    if kind == "float" and bits == 4:  # NVFP4 and MXFP4 have 8-bit scales
        shared = Fraction(8)
    return Scheme(Fraction(bits), 1, group, shared), f"{what}, scales of {group}"


_METHODS: dict[str, Callable[[Fields], tuple[SchemeOf, str]]] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "gptq": _gptq,
    "auto-round": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
}
