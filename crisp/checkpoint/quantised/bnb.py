"""bitsandbytes: 4-bit codes (nf4, fp4) in groups along the flattened weight, and 8-bit rows.

4 bits: ``X.weight`` U8 [n / 2, 1] has two codes a byte, the high half first; ``.quant_map`` the
value of each code, ``.absmax`` what a group is multiplied by, ``.quant_state.bitsandbytes__nf4`` a
JSON text with the shape. Under double quantisation ``absmax`` is a code of ``.nested_quant_map``
itself, times ``.nested_absmax``, plus an offset. 8 bits: ``X.weight`` I8 [out, in] and ``X.SCB``
[out], the largest weight of each row: the weight is q * SCB / 127.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial

import numpy as np

from crisp.checkpoint.files import TensorEntry
from crisp.checkpoint.quantised.axes import (
    FIXED,
    Axes,
    AxisOrder,
    take,
    take_halves,
    take_rows_of,
)
from crisp.checkpoint.quantised.numbers import Array, Floats, pair_words
from crisp.checkpoint.quantised.weight import Parts, Quantisation, QuantisedWeight, StoredTensors
from crisp.errors import CrispError

_STATE = ".quant_state.bitsandbytes__"
_LONGEST = 4096  # bytes of the JSON text


@dataclass(frozen=True)
class _State:
    """What the JSON text of a weight says."""

    shape: tuple[int, int]
    group: int  # numbers that share an absmax
    nested_group: int  # absmax that share a nested one; 0: they are floats
    offset: float  # of nested ones


def find(stored: StoredTensors) -> Quantisation:
    """Return all weights of 4 and of 8 bits; CrispError for a state that is not understood."""
    weights, unused = [], []
    for name, entry in stored.entries.items():
        base, mark, kind = name.partition(_STATE)
        if mark and kind in ("nf4", "fp4"):
            weights.append(_four_bits(stored, base, entry))
            unused.append(name)
        elif name.endswith(".SCB"):
            weight = name.removesuffix(".SCB") + ".weight"
            weights.append(_eight_bits(stored, weight, name))
        elif name.endswith(".weight_format"):
            if stored.read_small(entry, ("U8", "I64"), 1)[0] != 0:
                raise CrispError(f"{stored.checkpoint.where(name)}: its rows are not in order")
            unused.append(name)
    return Quantisation(weights, unused)


def _eight_bits(stored: StoredTensors, name: str, scale: str) -> QuantisedWeight:
    shape = stored.check(stored.need(scale, name).name, ("I8",)).shape
    if len(shape) != 2:
        raise stored.wrong(name, "I8 [out, in]")
    stored.check(scale, ("F32", "F16", "BF16"), (shape[0],))
    axes = AxisOrder(1, {"weight": take(0), "scale": take(0)}), AxisOrder(1, {"weight": take(1)})
    return QuantisedWeight(name, shape, {"weight": name, "scale": scale}, decode_rows, axes=axes)


def decode_rows(parts: Parts) -> Floats:
    """Return weight [out, in] of 8-bit rows, rounded as the library does."""
    weight = parts["weight"].floats()
    weight *= parts["scale"].floats()[:, None]
    weight *= np.float32(1 / 127)
    return weight


def _four_bits(stored: StoredTensors, name: str, state: TensorEntry) -> QuantisedWeight:
    about = _state(stored, state)
    count = about.shape[0] * about.shape[1]
    groups = -(-count // about.group)
    parts = {"codes": name, "absmax": f"{name}.absmax", "map": f"{name}.quant_map"}
    if about.nested_group:
        parts |= {"nested": f"{name}.nested_absmax", "nested_map": f"{name}.nested_quant_map"}
    for part in parts.values():
        stored.need(state.name, part)
    stored.check(name, ("U8",), (-(-count // 2), 1), (1, -(-count // 2)), (-(-count // 2),))
    stored.check(parts["absmax"], ("U8",) if about.nested_group else ("F32",), (groups,))
    stored.check(parts["map"], ("F32",), (16,))
    if about.nested_group:
        stored.check(parts["nested"], ("F32",), (-(-groups // about.nested_group),))
        stored.check(parts["nested_map"], ("F32",), (256,))
    decode = partial(decode_codes, state=about)
    return QuantisedWeight(name, about.shape, parts, decode, axes=_axes(about))


def _axes(state: _State) -> Axes:
    """Return how rows and columns can be ordered: not where scales share scales, or span rows."""
    columns, group = state.shape[1], state.group
    if state.nested_group or columns % group or group % 2:
        return FIXED
    each = columns // group
    return (
        AxisOrder(
            1, {"codes": take_halves(columns, 0, high_first=True), "absmax": take_rows_of(each, 0)}
        ),
        AxisOrder(
            group,
            {
                "codes": take_halves(columns, 1, high_first=True),
                "absmax": take_rows_of(each, 1, group),
            },
        ),
    )


def _state(stored: StoredTensors, entry: TensorEntry) -> _State:
    """Read the JSON text; CrispError for a damaged one."""
    where, text = stored.checkpoint.where(entry.name), stored.read_small(entry, ("U8",), _LONGEST)
    try:
        fields = json.loads(text.tobytes())
        shape, group = tuple(fields["shape"]), fields["blocksize"]
        nested, offset = fields.get("nested_blocksize", 0), fields.get("nested_offset", 0.0)
        good = all(type(n) is int and 0 < n < 1 << 31 for n in (*shape, group, nested or 1))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        good = False
    if not good or len(shape) != 2 or not isinstance(offset, int | float):
        raise CrispError(f"{where}: is no state of a weight [out, in]")
    return _State((shape[0], shape[1]), group, nested, float(offset))


def decode_codes(parts: Parts, state: _State) -> Floats:
    """Return weight [out, in] of 4-bit codes."""
    codes, values = parts["codes"].bits.reshape(-1), parts["map"].floats()
    pairs = pair_words(np.repeat(values, 16), np.tile(values, 16))  # the high half first
    count, group = state.shape[0] * state.shape[1], state.group
    weight: Floats = pairs[codes].view(np.float32)[:count]
    scales = absmax(parts, state)
    whole = count // group * group
    by_group = weight[:whole].reshape(-1, group)
    by_group *= scales[: len(by_group), None]
    weight[whole:] *= scales[-1]
    return weight.reshape(state.shape)


def absmax(parts: Parts, state: _State) -> Floats:
    """Return what each group is multiplied by, [groups]."""
    stored = parts["absmax"]
    if not state.nested_group:
        return stored.floats()
    scales: Array = parts["nested_map"].floats()[stored.bits]
    scales *= np.repeat(parts["nested"].floats(), state.nested_group)[: len(scales)]
    scales += np.float32(state.offset)
    return scales
