"""The fit of a model's geometry to a trace."""

from __future__ import annotations

from crisp.errors import CrispError
from crisp.model.spec import ModelSpec
from crisp.trace import RoutingTrace


def fit_to_trace(spec: ModelSpec, trace: RoutingTrace, top_k: int | None = None) -> ModelSpec:
    """Return the geometry to simulate: ``spec``, cut to the trace's layers.

    top_k: given where the trace was recorded with another k than the model's. Raises CrispError if
    the numbers of experts, k, or the MoE layers differ.
    """
    header = trace.header
    if top_k is not None:
        spec = spec.with_(top_k=top_k)
    if header.n_experts != spec.n_experts:
        raise CrispError(
            f"model {spec.name}: {spec.n_experts} experts, but the trace has {header.n_experts}; "
            "crisp trace capture, import and synth make a trace of another model"
        )
    if trace.k != spec.top_k:
        hint = "" if top_k is not None else f"; --top-k {trace.k} simulates it as recorded"
        raise CrispError(
            f"model {spec.name}: top-{spec.top_k}, but the trace was recorded with "
            f"top-{trace.k}{hint}"
        )
    if trace.layers > spec.n_layers:
        raise CrispError(
            f"model {spec.name}: {spec.n_layers} layers, but the trace has {trace.layers}; "
            f"--layers {spec.n_layers} runs the first of them"
        )
    spec = spec.first_layers(trace.layers)
    if trace.moe_layers != spec.moe_layers:
        raise CrispError(
            f"model {spec.name}: MoE layers {_format_layers(spec.moe_layers)}, but the trace has "
            f"{_format_layers(trace.moe_layers)}"
        )
    return spec


def _format_layers(layers: tuple[int, ...]) -> str:
    few = ", ".join(map(str, layers[:4]))
    return few if len(layers) <= 4 else f"{few}, ... ({len(layers)} of them)"
