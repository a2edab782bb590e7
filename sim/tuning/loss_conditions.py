"""The conditions under which losses were measured, and where what is simulated has others."""

from __future__ import annotations

from fractions import Fraction

from crisp.model.quantization import STORED_BITS
from crisp.policy import named
from crisp.profile.metadata import Metadata
from crisp.run.setup import Setup, other_geometry
from crisp.sim.tuning.losses import Losses

_SHOWN = 12  # digits of a hash
_BITS = {"bfloat16": Fraction(16), "float16": Fraction(16), "float32": Fraction(32)} | STORED_BITS


def loss_conditions(setup: Setup, losses: Losses, file: str) -> list[str]:
    """Return the conditions of the losses in a line, and each difference in one of its own.

    Losses stay usable where something differs: whether they hold there is the reader's to say.
    """
    conditions = (
        f"{file}: measured on {losses.model}, experts in {losses.dtype or 'an untold type'}, "
        f"{losses.expert_blocks} blocks each"
    )
    return [
        conditions,
        *_model_differences(setup, losses),
        *_type_differences(setup, losses),
        *_block_differences(setup, losses),
        *_count_differences(setup, losses),
    ]


def _model_differences(setup: Setup, losses: Losses) -> list[str]:
    trace = setup.inputs.trace
    traced, lines = trace.header.model, list[str]()
    metadata = setup.source.metadata
    if metadata is not None and losses.weights is not None:
        # a prepared model is called as its folder: its weights tell
        weights = Metadata.load(metadata).weights
        if weights != losses.weights:
            lines.append(
                f"differs: measured on weights {losses.weights[:_SHOWN]}, the metadata is of "
                f"{weights[:_SHOWN]}"
            )
    elif traced is None:
        lines.append("the trace does not say which model it is of: it may be another one")
    elif traced != losses.model and metadata is not None:
        lines.append(
            f"measured on {losses.model}, the routing is {traced}'s: the losses hold no hash that "
            "tells whether it is the prepared one"
        )
    elif traced != losses.model:
        lines.append(f"differs: measured on {losses.model}, the routing is {traced}'s")
    else:
        lines.append("models are compared by name: the losses hold no hash of the traced weights")
    if other_geometry(setup.spec, trace) and setup.spec.name != losses.model:
        lines.append(f"differs: measured on {losses.model}, the sizes are {setup.spec.name}'s")
    return lines


def _type_differences(setup: Setup, losses: Losses) -> list[str]:
    if losses.dtype is None:
        return ["the losses do not say in which type experts were"]
    if _BITS.get(losses.dtype) == setup.spec.bits:
        return []
    return [
        f"differs: measured with experts in {losses.dtype}, simulated in "
        f"{float(setup.spec.bits):g} bits"
    ]


def _block_differences(setup: Setup, losses: Losses) -> list[str]:
    if losses.expert_blocks == setup.spec.n_blocks:
        return []
    return [
        f"differs: measured with {losses.expert_blocks} blocks an expert, simulated with "
        f"{setup.spec.n_blocks}: widths are rounded up to whole ones"
    ]


def _count_differences(setup: Setup, losses: Losses) -> list[str]:
    """Compare counts of combinations, where widths are decided by them."""
    widths = [loss.width for loss in losses.rows
              if named(loss.policy, width=loss.width, prefetch="none").width.counted]  # fmt: skip
    digest = setup.inputs.profile.digest()
    if not widths or losses.profile == digest:
        return []
    decided = f"they decide {', '.join(dict.fromkeys(widths))}"
    if losses.profile is None:
        return [f"the losses do not say which counts they were measured with: {decided}"]
    source = (setup.inputs.split or "").removeprefix("profile: ")
    return [
        f"differs: measured with the counts {losses.profile[:_SHOWN]}, simulated with "
        f"{digest[:_SHOWN]} ({source}): {decided}"
    ]
