"""What ``crisp eval`` knows of a model from its preparation or from a trace: counts and texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from crisp.errors import CrispError

if TYPE_CHECKING:
    from crisp.checkpoint.windows import Windows
    from crisp.model.spec import ModelSpec
    from crisp.profile import Profile
    from crisp.profile.metadata import Metadata


def metadata_of(model: str, file: Path | None, profile: str | None) -> tuple[Path, Metadata] | None:
    """What was asked for or lies beside the model, if it belongs to the model's weights."""
    from crisp.checkpoint.files import weights_digest
    from crisp.cli.output.progress import progress_of
    from crisp.profile.metadata import FILE, Metadata

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
    found = Metadata.load(file)
    with progress_of(f"{model}: weights") as update:
        found.check_weights(weights_digest(model, update), model)
    return file, found


def counts_of(
    spec: ModelSpec, found: tuple[Path, Metadata] | None, profile: str | None
) -> tuple[Profile | None, str | None, dict[str, Any] | None]:
    """Counts of combinations, and where they came from: in words, and for the record."""
    from crisp.profile import Profile
    from crisp.trace import RoutingTrace
    from crisp.trace.bundled import resolve
    from crisp.trace.fitting import fit

    if found is not None:
        path, own = found
        facts = own.provenance
        told = f"{path}, neurons ordered by {own.order}; {own.roles_told}"
        origin: dict[str, Any] = {"metadata": str(path), "weights": own.weights}
        origin["order"] = own.order
        origin |= {key: facts.get(key) for key in ("roles", "texts", "tokens", "ordered_from")}
        return own.profile(), told, origin
    if profile is None:
        return None, None, None
    trace = RoutingTrace.load(resolve(profile))
    try:
        layers = fit(spec, trace).n_layers
    except CrispError as error:
        raise CrispError(f"--profile {profile}: {error}") from error
    if layers < spec.n_layers:
        raise CrispError(
            f"--profile {profile}: {layers} layers, but {spec.name} has {spec.n_layers}"
        )
    told = f"{trace.rows:,} rows of {Path(profile).name}"
    return Profile.from_trace(trace), told, {"trace": trace.digest(), "texts": trace.header.dataset}


def cautions(windows: Windows, found: tuple[Path, Metadata] | None) -> list[str]:
    """A word of warning where a text was calibrated on: losses there say little of other text."""
    facts = {} if found is None else found[1].provenance
    known = [*facts.get("texts", ()), *facts.get("ordered_from", {}).get("texts", ())]
    hashes = {str(text).rpartition("sha256:")[2] for text in known}
    return [
        f"caution: {name} is a text that the model was prepared with"
        for name, text in zip(windows.names, windows.dataset, strict=True)
        if text.rpartition("sha256:")[2] in hashes
    ]
