"""The route trace of BigMoeOnEdge (``--route-trace``): a CSV with the model's sizes above it.

One line is one expert of one token in one layer, by falling weight (slot 0 first). The last layer
of a prompt is evaluated for its last token only, so the other tokens have no experts there: they
are -1, as a row or a layer that is not there would be a lookup that never was. Each turn of a
session is a sequence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from crisp.errors import CrispError, reason_of, shorten
from crisp.trace import Header, RoutingTrace
from crisp.trace.importing.engines.log import EngineLog, KnownSizes

ENGINE = "bigmoeonedge"
_MAGIC = b"# route_trace v"
_MODEL = re.compile(
    r"# model=(?P<model>.*) arch=(?P<arch>\S*) n_layer=(?P<layers>\d{1,4}) "
    r"n_expert=(?P<experts>\d{1,5}) n_expert_used=(?P<k>\d{1,4})"
)
_LAYER = re.compile(r"# layer=(\d{1,4}) expert_bytes=(\d{1,15})( .*)?")
_NUMBERS = ("turn", "phase", "step", "layer", "slot", "expert", "residency", "expert_bytes")
_MOST_LAYERS, _MOST_EXPERTS = 4096, np.iinfo(np.int16).max
_LONGEST = 1 << 16  # bytes of a line of the preamble

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Preamble:
    """What stands above the table."""

    model: str
    arch: str
    layers: int
    experts: int
    k: int
    expert_bytes: tuple[int, ...]  # [layers]; 0 where the layer has no experts
    lines: int


def recognise(path: Path, head: bytes) -> bool:
    """Return whether a file that begins with ``head`` is a route trace of BigMoeOnEdge."""
    return head.startswith(_MAGIC)


def read(paths: Sequence[Path], sizes: KnownSizes) -> EngineLog:
    """Read one route trace; sizes: of the model, as far as the caller knows them.

    Raises CrispError, one line, for more than one file, for a file that is no such table, that is
    cut, or that holds what its preamble excludes.
    """
    if len(paths) != 1:
        raise CrispError(f"{paths[1]}: a second file; a BigMoeOnEdge route trace is one file")
    path = paths[0]
    preamble = _read_preamble(path)
    for given, found, what in (
        (sizes.n_experts, preamble.experts, "experts"),
        (sizes.n_layers, preamble.layers, "layers"),
    ):
        if given is not None and given != found:
            raise CrispError(f"{path}: a model of {found} {what}; {given} were expected")
    columns, weights = _read_table(path, preamble)
    notes = []
    dropped = columns.pop("dropped", None)
    if dropped is not None and dropped.any():
        notes.append(f"{int(dropped.sum()):,} experts that the engine dropped are left out")
        kept = dropped == 0
        columns = {name: values[kept] for name, values in columns.items()}
        weights = None if weights is None else weights[kept]
    return _as_log(path, preamble, columns, weights, notes)


def _read_preamble(path: Path) -> _Preamble:
    """Return what the lines with # say; CrispError where one is missing or out of range."""
    lines: list[str] = []
    with path.open("rb") as file:
        while (read := file.readline(_LONGEST)).startswith(b"#"):
            lines.append(read.decode("utf-8", "replace").rstrip("\r\n"))
    if not lines or not lines[0].encode().startswith(_MAGIC):
        raise CrispError(f"{path}: is not a BigMoeOnEdge route trace ('# route_trace v1' expected)")
    if lines[0] != "# route_trace v1":
        raise CrispError(f"{path}: '{shorten(lines[0])}' found; this reads '# route_trace v1'")
    model = next(filter(None, map(_MODEL.fullmatch, lines)), None)
    if model is None:
        raise CrispError(f"{path}: no line '# model=.. arch=.. n_layer=.. n_expert=..' found")
    layers, experts, k = (int(model[name]) for name in ("layers", "experts", "k"))
    for name, number, most in (
        ("n_layer", layers, _MOST_LAYERS),
        ("n_expert", experts, _MOST_EXPERTS),
        ("n_expert_used", k, experts),
    ):
        if not 1 <= number <= most:
            raise CrispError(f"{path}: {name} {number} found; expected 1 to {most}")
    sizes = dict.fromkeys(range(layers), 0)
    for line in lines:
        if line.startswith("# layer="):
            match = _LAYER.fullmatch(line)
            if match is None or int(match[1]) >= layers:
                raise CrispError(
                    f"{path}: '{shorten(line)}' found; expected a layer below {layers} and its "
                    "expert_bytes"
                )
            sizes[int(match[1])] = int(match[2])
    name = re.split(r"[/\\]", model["model"])[-1]
    return _Preamble(
        name, model["arch"], layers, experts, k, tuple(sizes.values()), len(lines)
    )  # fmt: skip


def _read_table(
    path: Path, preamble: _Preamble
) -> tuple[dict[str, Ints], npt.NDArray[np.float64] | None]:
    """Return the columns that are needed, checked for their range, and the weights."""
    kinds: dict[str, Any] = dict.fromkeys((*_NUMBERS, "dropped"), pa.int64())
    kinds["weight"] = pa.float64()
    try:
        table = pa.csv.read_csv(
            path,
            read_options=pa.csv.ReadOptions(skip_rows=preamble.lines),
            convert_options=pa.csv.ConvertOptions(column_types=kinds, null_values=[]),
        )
        columns_found = table.column_names
    except UnicodeDecodeError as error:
        raise CrispError(f"{path}: the names of its columns are not UTF-8") from error
    except (pa.ArrowException, OSError) as error:
        raise CrispError(f"{path}: {reason_of(error)}") from error
    missing = [name for name in _NUMBERS if columns_found.count(name) != 1]
    if missing:
        found = shorten(", ".join(columns_found))
        raise CrispError(f"{path}: no column {', '.join(missing)}, or several; found {found}")
    if not table.num_rows:
        raise CrispError(f"{path}: holds no routing")
    names = [*_NUMBERS, *(name for name in ("dropped",) if columns_found.count(name) == 1)]
    columns = {name: table[name].to_numpy() for name in names}
    _check_columns(path, preamble, columns)
    if columns_found.count("weight") != 1:
        return columns, None
    weights = table["weight"].to_numpy()
    if np.isnan(weights).any():  # not known, as the engine's graph did not show them
        return columns, None
    return columns, weights


def _check_columns(path: Path, preamble: _Preamble, columns: Mapping[str, Ints]) -> None:
    """Raise CrispError, with the line, for a number that cannot be."""
    most = {
        "turn": np.iinfo(np.int32).max,
        "step": np.iinfo(np.int32).max,
        "phase": 1,
        "layer": preamble.layers - 1,
        "slot": preamble.k - 1,
        "expert": preamble.experts - 1,
        "residency": 2,
        "dropped": 1,
    }
    first = preamble.lines + 2  # the table's first line, counted from 1
    for name, limit in most.items():
        if name not in columns:
            continue
        wrong = (columns[name] < 0) | (columns[name] > limit)
        if wrong.any():
            at = int(wrong.argmax())
            raise CrispError(
                f"{path}: line {at + first}: {name} {columns[name][at]}; expected 0 to {limit}"
            )
    size = np.array(preamble.expert_bytes)[columns["layer"]]
    wrong = (columns["expert_bytes"] != 0) & (columns["expert_bytes"] != size)
    if wrong.any():
        at = int(wrong.argmax())
        raise CrispError(
            f"{path}: line {at + first}: expert_bytes {columns['expert_bytes'][at]}; expected 0 or "
            f"the {size[at]} of layer {columns['layer'][at]}"
        )


def _as_log(
    path: Path,
    preamble: _Preamble,
    columns: Mapping[str, Ints],
    weights: npt.NDArray[np.float64] | None,
    notes: list[str],
) -> EngineLog:
    """Put the table's cells into a trace; CrispError for one that breaks its promises."""
    tokens, row = np.unique(
        np.stack([columns["turn"], columns["step"]], axis=1), axis=0, return_inverse=True
    )
    row = row.reshape(-1)
    shape = (len(tokens), preamble.layers, preamble.k)
    cell = row * preamble.layers + columns["layer"]
    order = np.lexsort((columns["slot"], cell))
    place = cell[order] * preamble.k + columns["slot"][order]
    if (np.diff(place) == 0).any():
        at = int(order[1:][np.diff(place) == 0][0])
        raise CrispError(
            f"{path}: line {at + preamble.lines + 2}: turn {columns['turn'][at]}, step "
            f"{columns['step'][at]}, layer {columns['layer'][at]} has slot {columns['slot'][at]} "
            "twice"
        )
    phase = np.zeros(len(tokens), np.uint8)
    phase[row] = columns["phase"]
    if (phase[row] != columns["phase"]).any():
        raise CrispError(f"{path}: a token is prefill in one layer and decode in another")
    # dropped slots leave gaps, and absent experts come last
    begins = np.diff(cell[order], prepend=-1) != 0
    rank = np.arange(len(order)) - np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    experts = np.full(shape, -1, np.int16)
    experts.reshape(-1, preamble.k)[cell[order], rank] = columns["expert"][order]
    found_weights, ordered = None, True
    if weights is not None:
        found_weights = np.zeros(shape, np.float16)
        with np.errstate(over="ignore"):  # becomes infinite, which is refused below
            found_weights.reshape(-1, preamble.k)[cell[order], rank] = weights[order]
        rises = (found_weights[..., 1:] > found_weights[..., :-1]) & (experts[..., 1:] >= 0)
        ordered = not rises.any()
        if not ordered:
            notes.append("router weights do not fall with the slot: the slots' order is kept")
    header = Header(
        n_experts=preamble.experts,
        top_k=preamble.k,
        ordered=ordered,
        origin="imported",
        model=preamble.model,
        note=f"imported from {path.name}, BigMoeOnEdge route trace, arch {preamble.arch}",
    )
    trace = RoutingTrace(
        experts=experts,
        sequence=tokens[:, 0].astype(np.int32),
        position=tokens[:, 1].astype(np.int32),
        phase=phase,
        header=header,
        weights=found_weights,
    )
    trace.validate(str(path))
    moe = list(trace.moe_layers)
    missing = experts[:, moe, 0] < 0
    pruned, absent = int(missing[phase == 0].sum()), int(missing.sum())
    if absent:
        notes.append(
            f"{absent:,} (token, layer)s have no record ({pruned:,} of prompt tokens, whose last "
            "layer is evaluated for the last token only): absent, not decoded"
        )
    return EngineLog(
        engine=ENGINE,
        trace=trace,
        expert_bytes=preamble.expert_bytes,
        absent=absent,
        notes=tuple(notes),
    )
