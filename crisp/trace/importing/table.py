"""Import of long tables (one row per sequence, token and layer) into a trace file.

The table is read twice: the first pass finds the tokens, the second puts every row where it
belongs in the mapped trace. So rows may come in any order, and memory is bounded: some bytes a
token, one batch of the table, and the pages being written.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crisp.errors import CrispError
from crisp.extensions import describe_origins
from crisp.files import atomic
from crisp.model.spec import ModelSpec
from crisp.trace import Header, RoutingTrace, tensor_file
from crisp.trace.check import half_weights
from crisp.trace.importing.engines.log import check_sizes
from crisp.trace.importing.ordering import sort_experts
from crisp.trace.importing.readers import KEYS, LongTable, open_table
from crisp.trace.importing.sequence_ids import UnnumberedSequencesError
from crisp.trace.importing.survey import (
    Ints,
    Progress,
    RowPlan,
    Survey,
    describe_token,
    plan_rows,
    run_starts,
    survey,
    token_keys,
)
from crisp.units import format_count

_UNKNOWN = 255  # a phase not yet seen
_STEP = 1 << 12  # rows filled together


@dataclass(frozen=True)
class Imported:
    """The result of an import: the sizes of the trace, and notes for its user."""

    table_rows: int
    rows: int
    layers: int
    k: int
    sequences: int
    dropped: int  # tokens left out, as they lack a layer
    notes: tuple[str, ...]
    drawn: bool = False  # the trace is synthetic: drawn from counts


def import_table(
    path: Path,
    out: Path,
    *,
    spec: ModelSpec | None = None,
    n_experts: int | None = None,
    n_layers: int | None = None,
    unordered: bool = False,
    drop_incomplete: bool = False,
    dataset: str | None = None,
    tokenizer: str | None = None,
    reader: str | None = None,
    called: Mapping[str, str] | None = None,
    progress: Progress = lambda share: None,
) -> Imported:
    """Write the table at ``path`` (parquet, CSV or JSON lines) as a trace to ``out``.

    The model is a ``spec``, or ``n_experts`` and ``n_layers``. Experts are sorted by falling weight
    where the table has weights, else taken to be; ``unordered`` leaves them and says so in the
    header. For ``drop_incomplete`` see `crisp.trace.importing.survey.plan_rows`. reader: one of
    `READERS`, in place of the file's ending. called: the file's own names of columns, by ours.

    Raises CrispError for tables that are unreadable, incomplete, or do not fit the model.
    """
    if spec is not None:
        n_experts, n_layers = spec.n_experts, spec.n_layers
    check_sizes(n_experts, n_layers, None)
    if n_experts is None or n_layers is None:
        raise CrispError("import: expected a model, or the numbers of experts and layers")
    origin = "" if reader is None else describe_origins([("importer", reader)])
    by = f" by {reader}, {origin}" if origin else ""  # a plugin
    with atomic(out) as temporary:  # first of all: it refuses a folder that is not there
        table = open_table(path, reader, called)
        try:
            tokens = survey(table, n_layers, n_experts, lambda share: progress(share / 2))
        except UnnumberedSequencesError:
            table = table.renumbered()
            tokens = survey(table, n_layers, n_experts, lambda share: progress(share / 2))
        if spec is not None:
            _check_layers(table, tokens, spec)
        plan = plan_rows(table, tokens, drop_incomplete)
        header = Header(
            n_experts=n_experts,
            top_k=tokens.k,
            ordered=not unordered,
            origin="imported",
            model=None if spec is None else spec.name,
            config_hash=None if spec is None else spec.config_hash,
            spec=None if spec is None else spec.to_dict(),
            dataset=dataset,
            tokenizer=tokenizer,
            note=f"imported from {path.name}{by}",
        )
        rows, shape = plan.sequence.shape, (len(plan.sequence), n_layers, tokens.k)
        layout: dict[str, tuple[npt.DTypeLike, tuple[int, ...]]] = {
            "experts": (np.int16, shape),
            "sequence": (np.int32, rows),
            "position": (np.int32, rows),
            "phase": (np.uint8, rows),
        }
        if table.weights:
            layout["weights"] = (np.float16, shape)
        mapped = tensor_file.create(temporary, header.to_metadata(), layout)
        trace = RoutingTrace(header=header, **mapped.arrays)
        trace.sequence[:], trace.position[:] = plan.sequence, plan.position
        resorted = _fill(
            table, tokens, plan, trace, mapped, lambda share: progress(0.5 + share / 2)
        )
        trace.validate(str(path), mapped.release)
    return Imported(
        table_rows=tokens.rows,
        rows=trace.rows,
        layers=n_layers,
        k=tokens.k,
        sequences=len(trace.sequences()[0]),
        dropped=plan.dropped,
        notes=tuple(_notes(table, tokens, plan, spec, resorted, out)),
    )


def note_top_k(spec: ModelSpec, k: int, what: str, out: Path) -> str:
    """Return the note on a log or table with another number of experts a token than the model's."""
    return (
        f"{spec.name} routes to {spec.top_k} experts, the {what} has {k}: "
        f"crisp simulate {shlex.quote(str(out))} --top-k {k} takes it as it is"
    )


def _check_layers(table: LongTable, tokens: Survey, spec: ModelSpec) -> None:
    """Raise CrispError unless the table has rows of the model's MoE layers, and of no others."""
    moe = set(spec.moe_layers)
    layers = {int(layer) for layer in np.flatnonzero(tokens.moe)}
    for odd, what in ((layers - moe, "is not MoE"), (moe - layers, "is MoE, but has no rows")):
        if odd:
            raise CrispError(f"{table.path}: layer {min(odd)} of {spec.name} {what}")


def _fill(
    table: LongTable,
    tokens: Survey,
    plan: RowPlan,
    trace: RoutingTrace,
    mapped: tensor_file.MappedTensors,
    progress: Progress,
) -> int:
    """Make the second pass: put experts, weights and phases in place.

    Returns how many table rows had to be sorted by weight.
    """
    n_layers, n_experts, k = trace.layers, trace.header.n_experts, tokens.k
    filled = np.zeros(trace.rows * n_layers, np.bool_)
    phase = np.full(trace.rows, _UNKNOWN, np.uint8)
    phased = ["phase"] if "phase" in table.names else []
    experts_out = trace.experts.reshape(-1, k)
    weights_out = None if trace.weights is None else trace.weights.reshape(-1, k)
    dense = ~tokens.layers
    for start in range(0, trace.rows if dense.any() else 0, _STEP):
        trace.experts[start : start + _STEP, dense] = -1
        mapped.release()
    resorted = 0
    for batch, share in table.batches([*KEYS, *table.experts, *table.weights, *phased]):
        key = token_keys(table, batch)
        starts = run_starts(key)
        rows = plan.row[np.searchsorted(tokens.keys, key[starts])]
        row = np.repeat(rows, np.diff(starts, append=len(key)))
        kept = row >= 0
        slot = (row * n_layers + table.integers(batch, "layer", n_layers - 1))[kept]
        experts = table.expert_matrix(batch, tokens.width, n_experts - 1)
        weights = table.weight_matrix(batch, tokens.width) if table.weights else None
        if weights is not None:
            weights[experts < 0] = (
                0  # elsewhere a weight that is not a number is refused in the end
            )
        resorted += sort_experts(experts, weights, trace.header.ordered)
        filled[slot] = True
        experts_out[slot] = experts[kept, :k]
        if weights is not None and weights_out is not None:
            weights_out[slot] = half_weights(weights[kept, :k], _describe_slots(table, trace, slot))
        if phased:
            _note_phases(table, phase, row[kept], table.integers(batch, "phase", 1)[kept])
        mapped.release()
        progress(share)
    # The number of rows of each token is right, so one that lacks a layer has another one twice.
    lacking = ~filled.reshape(-1, n_layers)[:, tokens.layers].all(axis=1)
    if lacking.any():
        token = int(np.flatnonzero(plan.row == lacking.argmax())[0])
        raise CrispError(f"{table.path}: {describe_token(table, tokens, token)} has a layer twice")
    trace.phase[:] = phase if phased else 1
    return resorted


def _describe_slots(table: LongTable, trace: RoutingTrace, slots: Ints) -> Callable[[int], str]:
    """Return what describes one of some (row, layer)s, in the words of a trace's checks."""

    def describe(at: int) -> str:
        row, layer = divmod(int(slots[at]), trace.layers)
        return (
            f"{table.path}: row {row} (sequence {trace.sequence[row]}, position "
            f"{trace.position[row]}), layer {layer}"
        )

    return describe


def _note_phases(table: LongTable, phase: npt.NDArray[np.uint8], row: Ints, new: Ints) -> None:
    """Note the phases of some rows; all layers of a token must agree."""
    before = phase[row]
    phase[row] = new
    if ((before != _UNKNOWN) & (before != new)).any() or (phase[row] != new).any():
        raise CrispError(f"{table.path}: a token is prefill in one layer and decode in another")


def _notes(
    table: LongTable,
    tokens: Survey,
    plan: RowPlan,
    spec: ModelSpec | None,
    resorted: int,
    out: Path,
) -> list[str]:
    """Return what the user should know of an import, a line each."""
    notes = []
    if spec is not None and tokens.k != spec.top_k:
        notes.append(note_top_k(spec, tokens.k, "table", out))
    absent = [str(layer) for layer in np.flatnonzero(~tokens.moe)]
    if spec is None and absent:
        notes.append(f"no rows of layer {', '.join(absent)}: taken as not MoE")
    if table.ids is not None:
        notes.append(
            f"sequences are text or large numbers: numbered from 0 to {len(table.ids) - 1} as they "
            "appear"
        )
    if tokens.k < tokens.width:
        notes.append(f"{tokens.width} places for experts, of which a row uses {tokens.k} at most")
    if plan.padding:
        notes.append(
            f"{format_count(plan.padding, 'token')} without any expert (padding): left out"
        )
    kept = plan.row >= 0
    dense = int((tokens.layers & ~tokens.moe).sum())
    empty = int((tokens.row_counts - tokens.filled)[kept].sum()) - dense * int(kept.sum())
    if empty:
        notes.append(f"{format_count(empty, 'table row')} without an expert: nothing is run there")
    if plan.dropped:
        notes.append(f"{plan.dropped} tokens lack a layer: left out")
    if plan.splits:
        notes.append(f"tokens are missing inside sequences: {plan.splits} new sequences begun")
    if resorted:
        notes.append(f"{resorted:,} table row{'s' * (resorted != 1)} sorted by weight")
    if "phase" not in table.names:
        notes.append("no column 'phase': all taken as decode")
    return notes
