"""A model, its texts, and readings of them that are kept between runs.

Neurons are reordered in memory; nothing is written into the model's folder. Every reading is kept
in the work folder under the digest of all that decides it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.quality.estimates import Reading
from crisp.adapter import Experts, attach, expert_layout
from crisp.checkpoint.files import weights_digest
from crisp.checkpoint.loading import load_model, to_float32
from crisp.files import atomic
from crisp.policy import Policy, named
from crisp.policy.spelling import build
from crisp.policy.widths.base import WidthPolicy
from crisp.policy.widths.names import WIDTHS
from crisp.profile import Profile
from crisp.quality import Scores, geometry, score_windows
from crisp.text_windows import TokenWindows, read_windows

KINDS = {0: "code", 1: "docs", 2: "kjv"}
BLOCK = 16  # neurons: half, three quarters and tenths of an expert are then exact, or nearly
WINDOW = 256
BATCH = 16  # windows
Orders = Mapping[int, npt.NDArray[np.int64]]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Amounts:
    """The numbers of tokens of each kind of text."""

    heldout: int = 6144
    calibration: int = 32768
    roles: int = 8192  # of the calibration text: grouped roles
    exact: int = 2048  # of the calibration text: exact roles
    masking: int = 4096  # of the held-out text: pairs masked one by one


@dataclass(frozen=True, eq=False)
class Routes:
    """The routers' choices for some tokens: experts by falling weight, -1 where absent."""

    ids: npt.NDArray[np.int16]  # [MoE layers, tokens, k]
    weights: npt.NDArray[np.float16]


class Setting:
    """A model in float32, with the texts it is calibrated and measured on."""

    def __init__(
        self, folder: Path, data: Path, work: Path, amounts: Amounts, tell: Tell = lambda what: None
    ) -> None:
        self.loaded = to_float32(load_model(str(folder)))
        self.spec = geometry(self.loaded, BLOCK)
        self.amounts, self.tell, self._data = amounts, tell, data
        self.heldout = self.windows("heldout", KINDS.values(), amounts.heldout)
        self.samples = {
            kind: self.windows("calibration", [kind], amounts.calibration)
            for kind in KINDS.values()
        }
        texts = [*self.heldout.dataset, *(windows.dataset[0] for windows in self.samples.values())]
        self.weights = weights_digest(folder)
        request = json.dumps([self.weights, texts, vars(amounts), BLOCK, WINDOW])
        self.work = work / f"{folder.name}-{hashlib.sha256(request.encode()).hexdigest()[:12]}"
        self.work.mkdir(parents=True, exist_ok=True)
        layers = expert_layout(self.loaded.model).layers
        self.experts = {layer.index: Experts.of(layer) for layer in layers}
        self._arranged: dict[int, npt.NDArray[np.int64]] = {
            layer: np.tile(np.arange(experts.d_ff), (experts.n_experts, 1))
            for layer, experts in self.experts.items()
        }
        self.original: Orders = dict(self._arranged)

    # -- texts ----------------------------------------------------------------------------------

    def windows(
        self, part: str, kinds: Iterable[str], tokens: int, stride: int = WINDOW
    ) -> TokenWindows:
        """Return the first ``tokens`` of each kind; part: ``heldout`` or ``calibration``."""
        texts = [self._data / "data" / f"{kind}.{part}.txt" for kind in kinds]
        tokenizer = self.loaded.tokenizer
        return read_windows(tokenizer, texts, WINDOW, stride, limit=tokens * len(texts))

    # -- orders of neurons ------------------------------------------------------------------------

    def arrange(self, orders: Orders) -> None:
        """Put the neurons into this order, from whatever order they stand in."""
        for layer, order in orders.items():  # order [experts, neurons]
            for expert in range(len(order)):
                here = self._arranged[layer][expert]
                move = np.argsort(here)[order[expert]]
                if (move != np.arange(len(move))).any():
                    self.experts[layer].shuffle(expert, _tensor(move))
        self._arranged = dict(orders)

    # -- reading ----------------------------------------------------------------------------------

    def read(
        self,
        width: str | WidthPolicy,
        orders: Orders,
        profile: Profile | None = None,
        *,
        renormalize: bool = False,
        windows: TokenWindows | None = None,
        within: tuple[str, Callable[[], AbstractContextManager[None]]] | None = None,
        bits: Mapping[int, npt.NDArray[np.int64]] | None = None,
    ) -> Reading:
        """Read the held-out text (or ``windows``) at the widths of ``width``.

        within: a name, and what is done to the model meanwhile. bits: of each expert's weights, by
        layer, in place of those stored.
        """
        windows = windows or self.heldout
        key = json.dumps([
            _digest(orders), repr(width) if not isinstance(width, str) else width,
            profile and profile.digest(), renormalize, windows.dataset, windows.stride,
            len(windows.tokens), within and within[0],
        ])  # fmt: skip
        file = self.work / f"reading-{hashlib.sha256(key.encode()).hexdigest()[:20]}.npz"
        if not file.exists():
            begin = time.monotonic()
            self.arrange(orders)  # before anything is done to the weights, and undone
            with within[1]() if within else nullcontext():
                kept = self._read(policy(width), profile, renormalize, windows)
            with atomic(file) as temporary, temporary.open("wb") as stream:
                np.savez(stream, **kept)
            name = width if isinstance(width, str) else type(width).__name__
            doing = f" within {within[0]}" if within else ""
            self.tell(f"read at {name}{doing}, {time.monotonic() - begin:.1f} s")
        with np.load(file) as kept:
            read = Scores(*(kept[name] for name in ("nll", "top", "window", "text")))
            return self._cost(read, kept["touched"], int(kept["rows"]), bits)

    def _read(
        self, policy: Policy, profile: Profile | None, renormalize: bool, text: TokenWindows
    ) -> dict[str, npt.NDArray[Any]]:
        layers, n = self.spec.moe_layers, self.spec.n_experts
        touched = np.zeros((len(layers), n), np.int64)  # blocks of each expert

        def watch(which: int, ids: Any, weights: Any, widths: Any) -> None:
            here = ids >= 0
            blocks = np.bincount(ids[here], widths[here], minlength=n)
            touched[which] += blocks.astype(np.int64)

        with attach(
            self.loaded.model, policy, profile,
            spec=self.spec, renormalize=renormalize, watch=watch,
        ) as attached:  # fmt: skip
            scores = score_windows(self.loaded.model, text, batch=BATCH)
        return {**vars(scores), "touched": touched, "rows": np.array(attached.tally.rows)}

    def _cost(
        self, read: Scores, touched: Any, rows: int, bits: Mapping[int, Any] | None
    ) -> Reading:
        spec = self.spec
        size = np.ones(touched.shape)
        if bits is not None:  # a scale of 16 bits goes with each 64 weights
            size = np.stack([bits[layer] + 16 / 64 for layer in spec.moe_layers]) / spec.dtype_bits
        blocks = float((touched * size).sum()) / rows
        full = len(spec.moe_layers) * spec.top_k * spec.n_blocks
        return Reading(read, blocks / full, blocks * spec.block_bytes, touched)

    def routes(self, windows: TokenWindows) -> Routes:
        """Return the full model's routing of every token of ``windows``, as they are fed."""
        chunks: dict[int, list[Any]] = {}

        def watch(which: int, ids: Any, weights: Any, widths: Any) -> None:
            chunks.setdefault(which, []).append((ids, weights))

        with attach(self.loaded.model, policy("full"), spec=self.spec, watch=watch):
            score_windows(self.loaded.model, windows, batch=BATCH)
        parts = [chunks[which] for which in range(len(chunks))]
        ids, weights = (
            np.stack([np.concatenate([x[i] for x in layer]) for layer in parts]) for i in (0, 1)
        )
        return Routes(ids, weights)


def policy(width: str | WidthPolicy) -> Policy:
    """Return a policy of these widths; its order and cache play no part here."""
    widths = build(width, WIDTHS, "width") if isinstance(width, str) else width
    return replace(named("lru"), width=widths)


def scored(windows: TokenWindows) -> npt.NDArray[np.int64]:
    """Return which of the tokens that are fed predict a scored one, in the order of `Scores`."""
    ends = np.cumsum([len(tokens) for tokens in windows.tokens]).tolist()
    rows = [np.arange(end - n - 1, end - 1) for end, n in zip(ends, windows.scored, strict=True)]
    return np.concatenate(rows)


def _digest(orders: Orders) -> str:
    digest = hashlib.sha256()
    for layer, order in sorted(orders.items()):
        digest.update(bytes([layer]) + np.ascontiguousarray(order, np.int64).tobytes())
    return digest.hexdigest()


def _tensor(values: npt.NDArray[np.int64]) -> Any:
    import torch

    return torch.from_numpy(values)
