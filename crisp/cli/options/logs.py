"""The log that a command is given: another engine's, or a routing trace."""

from __future__ import annotations

from pathlib import Path

from crisp.checkpoint.geometry.read import read_model
from crisp.diagnose.logged_run import LoggedRun
from crisp.errors import CrispError
from crisp.files import check_readable
from crisp.model.spec import ModelSpec
from crisp.trace import RoutingTrace
from crisp.trace.bundled import SUFFIX, resolve_trace
from crisp.trace.fitting import fit_to_trace
from crisp.trace.importing.engines import EngineLog, read_log
from crisp.units import parse_fraction


def load_logged_run(
    log: str, model: str | None, bits: str | None, top_k: int | None
) -> tuple[LoggedRun, str | None]:
    """Return the routing in a log or trace, and the engine that wrote it, if it was one.

    Sizes are the log's own, unless ``bits`` are given. Raises CrispError for a log without routing
    in order, or without the size of its experts.
    """
    geometry = None if model is None else read_model(model)
    spec = None if geometry is None else geometry.spec
    path = resolve_trace(log)
    check_readable(path)
    notes: tuple[str, ...] = ()
    sizes, wrote = None, None
    if path.name.endswith(SUFFIX) or _holds_trace(path):
        trace = RoutingTrace.load(path)
    else:
        n_experts, n_layers = (None, None) if spec is None else (spec.n_experts, spec.n_layers)
        known_k = spec.top_k if top_k is None and spec is not None else top_k
        read = read_log([path], n_experts=n_experts, n_layers=n_layers, top_k=known_k)
        if not isinstance(read, EngineLog):
            raise CrispError(f"{path}: holds counts without order, which no cache can be run on")
        trace, sizes, notes, wrote = read.trace, read.expert_bytes, read.notes, read.engine
    if spec is None and trace.header.spec is not None:
        spec = ModelSpec.from_dict(trace.header.spec, str(path))
    if spec is not None:
        stored = None if bits is None else parse_fraction(bits, "--bits")
        spec = fit_to_trace(spec.with_(bits=stored), trace, trace.k if top_k is None else top_k)
    if bits is not None and spec is None:
        raise CrispError("--bits: of what model? give --model")
    if sizes is None or bits is not None:
        if spec is None:
            raise CrispError(f"{path}: does not say how large an expert is; give --model")
        blocks = dict(zip(spec.moe_layers, spec.row_block_bytes, strict=True))
        sizes = tuple(spec.n_blocks * blocks.get(layer, 0) for layer in range(trace.layers))
        notes += () if geometry is None or bits is not None else geometry.notes
    name = path.name if Path(log).exists() else log
    return LoggedRun(name, trace, tuple(sizes), spec, notes), wrote


def _holds_trace(path: Path) -> bool:
    """Return whether a file of another name is a routing trace: its header says so."""
    with path.open("rb") as file:
        return b'"crisp-trace"' in file.read(1 << 12)
