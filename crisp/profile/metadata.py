"""The metadata of a prepared model, beside its weights: ``crisp.safetensors``.

It holds the counts of combinations, the roles measured in them, importance curves and the mean
contribution of every block, with the provenance of all of it. It belongs to the weights whose hash
it carries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from crisp.errors import CrispError, reason_of
from crisp.files import atomic, check_readable
from crisp.model.spec import ModelSpec
from crisp.profile import Profile, dominant, tiers
from crisp.profile.loss_curve import LossCurve
from crisp.profile.router_weights import QUANTILES
from crisp.units import parse_fraction

FILE = "crisp.safetensors"
VERSION = 2
POINTS = 32  # of an importance curve
RESCALING_RANGE = 0.5, 3.0  # of factors
ALPHA, BETA = (
    parse_fraction(".6", "alpha"),
    parse_fraction(".9", "beta"),
)  # of the stored tiers (paper, 3.3.1)

_L, _E = "layers", "experts"
_TENSORS: dict[str, tuple[type, tuple[str, ...]]] = {
    "expert_counts": (np.int64, (_L, _E)),
    "pair_counts": (np.int32, (_L, _E, _E)),
    "tiers": (np.uint8, (_L, _E, _E)),
    "increase": (np.float32, (_L, _E, _E)),
    "curves": (np.float32, (_L, _E, "points")),
    "contributions": (np.float32, (_L, _E, "blocks")),
    "router_weights": (np.float16, (_L, _E, "quantiles")),
}
# There where preparation was told to measure them: both or none.
_OPTIONAL: dict[str, tuple[type, tuple[str, ...]]] = {
    "width_losses": (np.float32, (_L, _E, "roles", "widths")),
    "role_counts": (np.int64, (_L, _E, "roles")),
}
# There since the policy saliency: both or none.
_SALIENCY: dict[str, tuple[type, tuple[str, ...]]] = {
    "sensitivities": (np.float32, (_L,)),
    "rescaling": (np.float16, (_L, _E, "widths")),
}
# There since scales of int4 are fitted with them.
_MOMENTS: dict[str, tuple[type, tuple[str, ...]]] = {"input_moments": (np.float16, (_L, "inputs"))}
_KNOWN = _TENSORS | _OPTIONAL | _SALIENCY | _MOMENTS


@dataclass(frozen=True, eq=False)
class Metadata:
    """The tensors and the provenance of a prepared model.

    Arrays cover all decoder layers; layers that are not MoE are zero, NaN in ``increase``, 1
    in ``rescaling``.
    """

    spec: ModelSpec
    weights: str  # hash of the prepared weights (crisp.checkpoint.files.weights_digest)
    order: str  # of the neurons, as spelled
    expert_counts: npt.NDArray[np.int64]  # [layers, experts] tokens routed to the expert
    pair_counts: npt.NDArray[np.int64]  # [layers, experts, experts] combinations, at i < j only
    # [layers, experts, experts]: at [l, i, j] what masking i costs in the pair {i, j}; NaN: unknown
    increase: npt.NDArray[np.float32]
    curves: npt.NDArray[np.float32]  # [layers, experts, 32] share of importance in the leading /32
    contributions: npt.NDArray[np.float32]  # [layers, experts, blocks] mean |activation| x |down|
    router_weights: npt.NDArray[np.float16]  # [layers, experts, 32] quantiles of its own
    provenance: Mapping[str, Any]  # texts, tokens, how roles were found, times, versions
    # [layers, experts, 2, blocks + 1] nats a token that an expert costs at each width, as the
    # anchor (0) and beside it (1); NaN: unknown
    width_losses: npt.NDArray[np.float32] | None = None
    role_counts: npt.NDArray[np.int64] | None = None  # [layers, experts, 2] tokens behind it
    # [layers] and [layers, experts, blocks + 1]: see `crisp.profile.Profile`
    sensitivities: npt.NDArray[np.float32] | None = None
    rescaling: npt.NDArray[np.float16] | None = None
    loss_curve: LossCurve | None = None  # what thresholds of policy saliency lose
    # [layers, d_model] mean square of each number of the experts' input, relative to their mean
    input_moments: npt.NDArray[np.float16] | None = None
    # [layers, experts, d_model + 1]: see `crisp.profile.Profile`; in a file of their own
    magnitudes: npt.NDArray[np.float16] | None = None

    def profile(self) -> Profile:
        """Return the counts, with the measured roles."""
        return Profile(
            self.expert_counts,
            self.pair_counts,
            True,
            dominant(self.increase),
            self.router_weights,
            self.contributions,
            self.width_losses,
            self.role_counts,
            self.sensitivities,
            None if self.rescaling is None else self.rescaling.astype(np.float32),
            self.magnitudes,
        )

    @property
    def roles_description(self) -> str:
        """How the dominant expert of a pair is determined, in words; for k > 2 it is the anchor."""
        roles = self.provenance.get("roles", {})
        if not roles.get("measured") or self.spec.top_k > 2:
            return "roles by the router's weight"
        rest = roles["pairs"] - roles["measured"]
        return (
            f"roles {roles['method']} of {roles['measured']:,}, by the router's weight of {rest:,}"
        )

    def moments(self) -> dict[int, npt.NDArray[np.float32]] | None:
        """Return the input's moments [d_model] by MoE layer; None where they were not measured."""
        if self.input_moments is None:
            return None
        rows = self.input_moments.astype(np.float32)
        return {layer: rows[layer] for layer in self.spec.moe_layers}

    def check_weights(self, digest: str, where: str) -> None:
        """Raise CrispError unless the weights in ``where`` are those this metadata was made for."""
        if digest != self.weights:
            raise CrispError(
                f"{where}: its weights (hash {digest[:12]}…) are not those the metadata "
                f"belongs to ({self.weights[:12]}…)"
            )

    def save(self, path: Path | str) -> None:
        """Write the file, which stays under 2 MB for the models it is meant for.

        Magnitudes, which are larger, are written to `magnitudes_file`.
        """
        tensors = {
            "expert_counts": self.expert_counts,
            "pair_counts": self.pair_counts,
            "tiers": tiers(self.profile(), ALPHA, BETA),
            "increase": self.increase,
            "curves": self.curves,
            "contributions": self.contributions,
            "router_weights": self.router_weights,
            "width_losses": self.width_losses,
            "role_counts": self.role_counts,
            "sensitivities": self.sensitivities,
            "rescaling": self.rescaling,
            "input_moments": self.input_moments,
        }
        header = {
            "version": VERSION,
            "model": self.spec.to_dict(),
            "weights": self.weights,
            "order": self.order,
            "provenance": dict(self.provenance),
        }
        if self.loss_curve is not None:
            header["loss_curve"] = self.loss_curve.to_dict()
        typed: dict[str, npt.NDArray[Any]] = {
            name: np.ascontiguousarray(tensors[name], dtype)
            for name, (dtype, _) in _KNOWN.items()
            if tensors[name] is not None
        }
        # One entry: safetensors writes several in an order of its own, another each time.
        content = save(typed, {"crisp": json.dumps(header, sort_keys=True)})
        beside = magnitudes_file(path)
        if self.magnitudes is None:
            beside.unlink(missing_ok=True)  # of what was saved here before
        else:
            with atomic(beside) as temporary:
                temporary.write_bytes(
                    save({"magnitudes": self.magnitudes}, {"weights": self.weights})
                )
        with atomic(path) as temporary:
            temporary.write_bytes(content)

    @classmethod
    def load(cls, path: Path | str) -> Metadata:
        """Read and check the file; CrispError says what is wrong with it."""
        check_readable(path)
        try:
            with safe_open(path, "np") as file:
                header = _header(path, file.metadata() or {})
                stored = set(file.keys())
                expected = dict(_TENSORS)
                for group in (_OPTIONAL, _SALIENCY, _MOMENTS):
                    expected |= group if stored & group.keys() else {}
                lacks = sorted(expected.keys() - stored)
                if lacks:
                    raise CrispError(f"{path}: lacks {lacks[0]}")
                tensors = {name: file.get_tensor(name) for name in expected}
        except OSError as error:
            raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
        except SafetensorError as error:
            raise CrispError(f"{path}: is no safetensors file: {reason_of(error)}") from error
        spec = ModelSpec.from_dict(header["model"], str(path))
        _check_tensors(path, spec, tensors)
        fields = {name: tensor for name, tensor in tensors.items() if name != "tiers"}
        fields["pair_counts"] = fields["pair_counts"].astype(np.int64)
        curve = header.get("loss_curve")
        metadata = cls(
            spec=spec,
            weights=header["weights"],
            order=header["order"],
            provenance=header["provenance"],
            loss_curve=None if curve is None else LossCurve.from_dict(curve, str(path)),
            magnitudes=_load_magnitudes(magnitudes_file(path), spec, header["weights"]),
            **fields,
        )
        if not np.array_equal(tensors["tiers"], tiers(metadata.profile(), ALPHA, BETA)):
            raise CrispError(f"{path}: its tiers do not follow from its counts")
        return metadata


def magnitudes_file(path: Path | str) -> Path:
    """Return the file of magnitudes that belongs to a file of metadata: x.magnitudes.safetensors.

    They are 2 bytes x experts x (d_model + 1) a layer: 2.1 MB for Mixtral-8x7B.
    """
    return Path(path).with_suffix(".magnitudes.safetensors")


def _load_magnitudes(path: Path, spec: ModelSpec, weights: str) -> npt.NDArray[np.float16] | None:
    """Return the magnitudes [layers, experts, d_model + 1] of a file; None: there is none."""
    if not path.exists():
        return None
    check_readable(path)
    try:
        with safe_open(path, "np") as file:
            made_for, names = (file.metadata() or {}).get("weights"), set(file.keys())
            if names != {"magnitudes"}:
                raise CrispError(f"{path}: has {sorted(names)}; expected magnitudes")
            magnitudes: npt.NDArray[np.float16] = file.get_tensor("magnitudes")
    except OSError as error:
        raise CrispError(f"{path}: cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CrispError(f"{path}: is no safetensors file: {reason_of(error)}") from error
    if made_for != weights:
        raise CrispError(f"{path}: is of other weights than the metadata beside it")
    shape = spec.n_layers, spec.n_experts, spec.d_model + 1
    if magnitudes.shape != shape or magnitudes.dtype != np.float16:
        raise CrispError(
            f"{path}: magnitudes is {magnitudes.dtype} {magnitudes.shape}, expected float16 {shape}"
        )
    if not np.isfinite(magnitudes).all():
        raise CrispError(f"{path}: magnitudes: a value that is no number")
    return magnitudes


_HEADER = {"model": dict, "weights": str, "order": str, "provenance": dict}


def _header(path: Path | str, entries: Mapping[str, str]) -> dict[str, Any]:
    """Return the checked header of the file."""
    try:
        header = json.loads(entries.get("crisp", "null"))
    except (ValueError, RecursionError) as error:
        raise CrispError(f"{path}: its header is damaged: {reason_of(error)}") from error
    if not isinstance(header, dict) or header.get("version") != VERSION:
        raise CrispError(f"{path}: is not metadata of a prepared model (version {VERSION})")
    for key, kind in _HEADER.items():
        if not isinstance(header.get(key), kind):
            raise CrispError(f"{path}: its header is damaged: {key} is no {kind.__name__}")
    return header


def _check_tensors(
    path: Path | str, spec: ModelSpec, tensors: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Raise CrispError for a tensor of another shape or type, or with impossible values."""
    sizes = {_L: spec.n_layers, _E: spec.n_experts, "points": POINTS, "blocks": spec.n_blocks}
    sizes |= {"quantiles": QUANTILES, "roles": 2, "widths": spec.n_blocks + 1}
    sizes |= {"inputs": spec.d_model}
    for name, tensor in tensors.items():
        dtype, axes = _KNOWN[name]
        shape = tuple(sizes[axis] for axis in axes)
        if tensor.shape != shape or tensor.dtype != dtype:
            raise CrispError(
                f"{path}: {name} is {tensor.dtype} {tensor.shape}, expected "
                f"{np.dtype(dtype)} {shape}"
            )
        if name in ("increase", "width_losses"):
            if np.isinf(tensor).any():
                raise CrispError(f"{path}: {name}: an infinite value")
            if name == "width_losses" and np.isnan(tensor).all():
                raise CrispError(f"{path}: {name}: no loss was measured")
        elif not np.isfinite(tensor).all() or (tensor < 0).any():
            raise CrispError(f"{path}: {name}: a value that is negative or no number")
    if "rescaling" in tensors:
        factors, (least, most) = tensors["rescaling"], RESCALING_RANGE
        if factors.min() < least or factors.max() > most:
            raise CrispError(f"{path}: rescaling: a factor that is not from {least:g} to {most:g}")
        if (factors[:, :, [0, -1]] != 1).any():
            raise CrispError(f"{path}: rescaling: a factor other than 1 at no block or at all")
    if tensors["expert_counts"].max(initial=0) >= 1 << 40:
        raise CrispError(f"{path}: expert_counts: more tokens than anybody could have read")
    if np.tril(tensors["pair_counts"]).any():
        raise CrispError(f"{path}: pair_counts: a combination (i, j) with i >= j")
