"""Inputs of a quality measurement: a prepared model's metadata, and counts of combinations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crisp.checkpoint.files import weights_digest
from crisp.errors import CrispError
from crisp.profile import Profile
from crisp.profile.metadata import FILE, Metadata
from crisp.trace import RoutingTrace
from crisp.trace.bundled import resolve_trace
from crisp.trace.fitting import fit_to_trace

if TYPE_CHECKING:
    from crisp.model.spec import ModelSpec
    from crisp.text_windows import TokenWindows

Bar = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True, eq=False)
class ModelCounts:
    """Counts of combinations, and where they came from; all None: there are none."""

    profile: Profile | None = None
    origin: str | None = None  # in words
    record: dict[str, Any] | None = None  # the same, safe for JSON


def load_model_metadata(
    model: str,
    file: Path | None,
    profile: str | None,
    progress: Bar = lambda what: nullcontext(lambda done, total: None),
) -> tuple[Path, Metadata] | None:
    """Return the metadata that was asked for or lies beside the model, and its path.

    None: there is none, or ``profile`` is to be counted instead. progress: opens a bar for what is
    being read, which is told (done, of how many).

    Raises CrispError for metadata of other weights than the model's.
    """
    if profile is not None:
        if file is not None:
            raise CrispError(
                f"--profile {profile}: counts are taken from --metadata {file} already"
            )
        return None
    beside = Path(model) / FILE
    file = file or (beside if beside.is_file() else None)
    if file is None:
        return None
    if not Path(model).is_dir():
        raise CrispError(
            f"--metadata {file}: belongs to a folder's weights, but {model} is no folder"
        )
    metadata = Metadata.load(file)
    with progress(f"{model}: weights") as update:
        metadata.check_weights(weights_digest(model, update), model)
    return file, metadata


def load_model_counts(
    spec: ModelSpec, prepared: tuple[Path, Metadata] | None, profile: str | None
) -> ModelCounts:
    """Return counts of combinations from metadata, or from a trace; CrispError for another model's.

    prepared: as of `load_model_metadata`; profile: a trace of the model, by name or path.
    """
    if prepared is not None:
        path, metadata = prepared
        record: dict[str, Any] = {"metadata": str(path), "weights": metadata.weights}
        record["order"] = metadata.order
        names = ("roles", "texts", "tokens", "ordered_from")
        record |= {name: metadata.provenance.get(name) for name in names}
        origin = f"{path}, neurons ordered by {metadata.order}; {metadata.roles_description}"
        return ModelCounts(metadata.profile(), origin, record)
    if profile is None:
        return ModelCounts()
    trace = RoutingTrace.load(resolve_trace(profile))
    try:
        layers = fit_to_trace(spec, trace).n_layers
    except CrispError as error:
        raise CrispError(f"--profile {profile}: {error}") from error
    if layers < spec.n_layers:
        raise CrispError(
            f"--profile {profile}: {layers} layers, but {spec.name} has {spec.n_layers}"
        )
    origin = f"{trace.rows:,} rows of {Path(profile).name}"
    record = {"trace": trace.digest(), "texts": trace.header.dataset}
    return ModelCounts(Profile.from_trace(trace), origin, record)


def calibration_warnings(
    windows: TokenWindows, prepared: tuple[Path, Metadata] | None
) -> list[str]:
    """Return a warning for each text that the model was prepared with.

    Losses on such a text say little of other text.
    """
    provenance = {} if prepared is None else prepared[1].provenance
    texts = [*provenance.get("texts", ()), *provenance.get("ordered_from", {}).get("texts", ())]
    hashes = {str(text).rpartition("sha256:")[2] for text in texts}
    return [
        f"caution: {name} is a text that the model was prepared with"
        for name, text in zip(windows.names, windows.dataset, strict=True)
        if text.rpartition("sha256:")[2] in hashes
    ]
