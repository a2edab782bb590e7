"""The checks of a trace, made a few rows at a time so that a large file stays on the disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.trace.header import Header

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]  # those of a trace, by the names in TENSORS
Fault = tuple[int, int, str]  # row, layer, what is wrong there

TENSORS: dict[str, tuple[npt.DTypeLike, int]] = {  # name -> (type, dimensions)
    "experts": (np.int16, 3),
    "sequence": (np.int32, 1),
    "position": (np.int32, 1),
    "phase": (np.uint8, 1),
    "weights": (np.float16, 3),
    "guess": (np.int16, 3),
    "token": (np.int32, 1),
    "scores": (np.float16, 3),
    "magnitudes": (np.float16, 3),
}
OPTIONAL = ("weights", "guess", "token", "scores", "magnitudes")
ORIGINS = ("captured", "imported", "synthetic")

_ENTRIES = 1 << 20  # (row, layer, rank) entries checked at a time
MOST_WEIGHT = 65_504
_INFINITE, _SIGN = 0x7C00, 0x8000  # bit patterns of float16


def validate(
    header: Header, tensors: Tensors, name: str, release: Callable[[], None] = lambda: None
) -> None:
    """Raise a CrispError that names the first broken promise of a trace, its row and its layer.

    name: what the trace is called in errors. release: called after every few rows.
    """
    _check_shapes(tensors, name)
    experts = tensors["experts"]  # [rows, layers, k]
    rows, layers, k = experts.shape
    _check_header(header, layers, k, name)
    _check_scores(header, tensors, name)
    sequence, position, phase = (tensors[key] for key in ("sequence", "position", "phase"))
    weights, guess, scores = (tensors.get(key) for key in ("weights", "guess", "scores"))
    magnitudes = tensors.get("magnitudes")

    def place(row: int) -> str:
        return f"row {row} (sequence {sequence[row]}, position {position[row]})"

    step = max(1, _ENTRIES // (layers * (k if scores is None else header.n_experts)))
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        with_last = slice(max(0, start - 1), start + step)  # each row is compared with the last
        disorder = _find_disorder(sequence[with_last], position[with_last], phase[with_last])
        if disorder:
            row = with_last.start + disorder[0]
            raise CrispError(f"{name}: {place(row)}: {disorder[1]}")
        fault = _find_bad_expert(experts[chunk], header.n_experts)
        if not fault and weights is not None:
            fault = _find_bad_weight(weights[chunk], experts[chunk], header.ordered)
        if not fault and guess is not None:
            fault = _find_bad_expert(guess[chunk], header.n_experts, "guessed expert")
        if not fault and scores is not None:
            fault = _find_bad_score(scores[chunk])
        if not fault and magnitudes is not None:
            fault = _find_bad_magnitude(magnitudes[chunk])
        if fault:
            row, layer, what = fault
            raise CrispError(f"{name}: {place(start + row)}, layer {layer}: {what}")
        release()


def _check_shapes(tensors: Tensors, name: str) -> None:
    experts = tensors["experts"]
    if experts.ndim != 3 or 0 in experts.shape:
        shape = list(experts.shape)
        raise CrispError(f"{name}: experts is {shape}; expected [rows, layers, k], none of them 0")
    for tensor, (dtype, dimensions) in TENSORS.items():
        array = tensors.get(tensor)
        if array is None:
            continue
        expected = experts.shape[:dimensions]
        if tensor == "scores" and array.ndim == 3:  # its last dimension is the header's
            expected = (*expected[:2], array.shape[2])
        if array.dtype != dtype or array.shape != expected:
            raise CrispError(
                f"{name}: {tensor} is {array.dtype} {list(array.shape)}; "
                f"expected {np.dtype(dtype)} {list(expected)}"
            )


def _check_scores(header: Header, tensors: Tensors, name: str) -> None:
    """Raise CrispError unless there is a score for each expert, where there are scores."""
    scores = tensors.get("scores")
    if scores is not None and scores.shape[2] != header.n_experts:
        raise CrispError(
            f"{name}: scores are of {scores.shape[2]} experts; expected n_experts, "
            f"{header.n_experts}"
        )


def _check_header(header: Header, layers: int, k: int, name: str) -> None:
    """Raise CrispError unless the header agrees with itself and with ``experts`` [_, layers, k]."""
    spec = header.spec or {}

    def must(good: bool, what: str) -> None:
        if not good:
            raise CrispError(f"{name}: header: {what}")

    must(
        1 <= header.n_experts <= np.iinfo(np.int16).max,
        f"n_experts is {header.n_experts}; expected 1 to {np.iinfo(np.int16).max}",
    )
    must(header.top_k == k, f"top_k is {header.top_k}, but rows have {k} experts")
    must(
        header.top_k <= header.n_experts,
        f"top_k is {header.top_k}; expected at most the {header.n_experts} experts",
    )
    for key, value in vars(header).items():
        text = isinstance(value, str) and value.encode(errors="replace").decode()
        must(text in (False, value), f"{key} {value!r} is not Unicode text")
    must(header.origin in ORIGINS, f"origin is '{header.origin}'; expected {', '.join(ORIGINS)}")
    must(header.origin != "synthetic" or header.seed is not None, "synthetic, but no seed")
    for key, here in (("n_experts", header.n_experts), ("n_layers", layers)):
        value = spec.get(key, here)
        must(value == here, f"its model has {key} {value}, the trace {here}")


def _find_disorder(sequence: Array, position: Array, phase: Array) -> tuple[int, str] | None:
    """Return the first row that is out of order, and what is wrong with it.

    Rows are sorted by (sequence, position), without gaps in a sequence, prefill before decode.
    """
    for values, what in ((sequence, "sequence"), (position, "position")):
        if (row := _first_row(values < 0)) is not None:
            return row, f"{what} is negative"
    if (row := _first_row(phase > 1)) is not None:
        return row, f"phase {phase[row]} found; expected 0 (prefill) or 1 (decode)"
    same = sequence[1:] == sequence[:-1]
    step = position[1:].astype(np.int64) - position[:-1]
    if (row := _first_row(sequence[1:] < sequence[:-1])) is not None:
        rule = "rows must be sorted by (sequence, position)"
        return row + 1, f"comes after sequence {sequence[row]}; {rule}"
    if (row := _first_row(same & (step != 1))) is not None:
        rule = "must have no gaps" if step[row] > 1 else "must rise by one"
        return row + 1, f"comes after position {position[row]}; positions of a sequence {rule}"
    if (row := _first_row(same & (phase[1:] < phase[:-1]))) is not None:
        return row + 1, "prefill after decode"
    return None


def _find_bad_expert(experts: Array, n_experts: int, what: str = "expert") -> Fault | None:
    """Return the first bad id in experts [rows, layers, k]: range, absent ones last, distinct."""
    ranks = np.ascontiguousarray(np.moveaxis(experts, -1, 0))  # [k, rows, layers]
    if ranks.min() < -1 or ranks.max() >= n_experts:
        row, layer, rank = _first_index((experts < -1) | (experts >= n_experts))
        expert = experts[row, layer, rank]
        expected = f"expected 0 to {n_experts - 1}, or -1 for none"
        return row, layer, f"{what} {expert} found; {expected}"
    present = ranks >= 0
    late = ~present[:-1] & present[1:]
    if late.any():
        row, layer = _first_index(np.logical_or.reduce(late))
        return (
            row,
            layer,
            f"{what}s {_format_list(experts[row, layer])}; absent ones (-1) must come last",
        )
    for a, b in combinations(range(len(ranks)), 2):
        if (twice := (ranks[a] == ranks[b]) & present[b]).any():
            row, layer = _first_index(twice)
            return (
                row,
                layer,
                f"{what}s {_format_list(experts[row, layer])}; {ranks[a][row, layer]} twice",
            )
    return None


def half_weights(weights: Array, where: Callable[[int], str]) -> npt.NDArray[np.float16]:
    """Return router weights [rows, ...] as traces keep them; CrispError for one beyond float16.

    where: says what a row is, in errors. Numbers that are infinite or none stay so, and are refused
    when the trace is checked.
    """
    beyond = (weights > MOST_WEIGHT) & np.isfinite(weights)
    if beyond.any():
        place = _first_index(beyond)
        raise CrispError(
            f"{where(place[0])}: weight {weights[place]:g} found; expected at most "
            f"{MOST_WEIGHT:,}, the largest number of float16, in which traces keep weights"
        )
    return weights.astype(np.float16)


def _find_bad_weight(weights: Array, experts: Array, ordered: bool) -> Fault | None:
    """Return the first bad weight in weights [rows, layers, k].

    Weights are finite and not negative; where ``ordered``, they fall with the rank.
    """
    # As float16 is slow to compare, its bit patterns are: those of numbers >= 0 sort like numbers.
    bits = weights.view(np.uint16)
    bad = (bits >= _INFINITE) & (bits != _SIGN)  # -0. is 0
    if bad.any():
        row, layer, rank = _first_index(bad)
        weight = weights[row, layer, rank]
        return row, layer, f"weight {weight} found; expected a finite number, not negative"
    if ordered:
        size = bits & ~np.uint16(_SIGN)
        rises = (size[..., 1:] > size[..., :-1]) & (experts[..., 1:] >= 0)
        if rises.any():
            row, layer, _ = _first_index(rises)
            shown = _format_list(weights[row, layer])
            return row, layer, f"weights {shown} rise, but the header says ordered by weight"
    return None


def _find_bad_magnitude(magnitudes: Array) -> Fault | None:
    """Return the first of magnitudes [rows, layers, k] that is not finite and above 0."""
    bits = magnitudes.view(np.uint16)
    bad = (bits >= _INFINITE) | (bits == 0)  # with a sign it is >= 0x8000
    if bad.any():
        row, layer, rank = _first_index(bad)
        found = magnitudes[row, layer, rank]
        return row, layer, f"magnitude {found} found; expected a finite number above 0"
    return None


def _find_bad_score(scores: Array) -> Fault | None:
    """Return the first score of scores [rows, layers, experts] that is not a finite number."""
    bits = scores.view(np.uint16)  # float16 is slow to look at
    bad = (bits & _INFINITE) == _INFINITE
    if bad.any():
        row, layer, expert = _first_index(bad)
        score = scores[row, layer, expert]
        return row, layer, f"score {score} of expert {expert} found; expected a finite number"
    return None


def _first_row(bad: Array) -> int | None:
    return int(bad.argmax()) if bad.any() else None


def _first_index(bad: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))


def _format_list(values: Array) -> str:
    return "[" + ", ".join(str(value) for value in values) + "]"
