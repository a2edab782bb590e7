"""Calibration of a model that is larger than memory, one decoder layer after the other.

All windows pass a layer before the next is read; between layers their hidden states lie on disk.
What is added up is what `crisp.prepare.calibration` adds up, in the same batches, in float32.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from crisp.adapter import Experts, Layout, handling
from crisp.checkpoint.skeleton import Skeleton, open_skeleton
from crisp.checkpoint.windows import Windows
from crisp.errors import CrispError
from crisp.extras import need
from crisp.files import atomic
from crisp.prepare.calibration import Calibration, Floats, Ints, LayerSums, batches


@dataclass(frozen=True, eq=False)
class Norms:
    """What is left of one layer's experts when their weights are gone: see `Experts.norms`."""

    name: str  # of the experts' module
    both: Floats  # [2, E, d_ff]: L2 norm of each neuron's gate and up weights, and of its down row

    @property
    def n_experts(self) -> int:
        """Routed experts of the layer."""
        return int(self.both.shape[1])

    def norms(self, expert: int) -> tuple[Any, Any]:
        """As `Experts.norms`."""
        first, down = need("torch").from_numpy(self.both[:, expert])
        return first, down


@dataclass(frozen=True, eq=False)
class Layerwise:
    """The sums of all MoE layers, by layer the norms of their neurons, and the model's layout."""

    found: Layout
    calibration: Calibration
    norms: dict[int, Norms]


def layerwise(
    folder: Path,
    windows: Windows,
    spill: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Layerwise:
    """Calibrate the model in ``folder`` on ``windows`` with one decoder layer in memory at a time.

    In memory at most: one layer in float32, one batch and the sums. In ``spill`` (made if it is not
    there): float32 hidden states of every token before and after the layer, and what has been added
    up. After a kill the same call goes on at the first layer that was not finished, and gives what
    one go gives, to the bit. The folder may be removed afterwards.

    progress: told (tokens times layers done, in all). Raises CrispError for what `open_skeleton`
    and `crisp.prepare.calibration.calibrate` refuse, for a ``spill`` of another calibration and for
    a full disk.
    """
    skeleton = open_skeleton(folder)
    state = _Spill(spill, _fingerprint(folder, windows.tokens))
    layers = {layer.index: layer for layer in skeleton.found.layers}
    n = skeleton.found.n_layers
    for index in range(n):
        if state.finished(index):
            continue
        with skeleton.holding(index):
            experts = Experts.of(layers[index]) if index in layers else None
            sums = None if experts is None else LayerSums.empty(experts.n_experts, experts.d_ff)

            def handler(
                _: int,
                hidden: Any,
                index: Any,
                weights: Any,
                __: Any,
                experts: Any = experts,
                sums: Any = sums,
            ) -> Any:
                return sums.run(experts, hidden, index, weights)

            with need("torch").inference_mode(), handling(skeleton.found, handler):
                for done in _pass(skeleton, index, windows, state):
                    progress(index * windows.fed + done, n * windows.fed)
            state.finish(index, sums, None if experts is None else _norms(experts))
    calibration = Calibration({}, len(windows.tokens), windows.fed)
    found = Layerwise(skeleton.found, calibration, {})
    for index, layer in layers.items():
        calibration.layers[index] = state.sums(index)
        found.norms[index] = Norms(layer.name, state.norms(index))
    return found


def _pass(skeleton: Skeleton, index: int, windows: Windows, state: _Spill) -> Iterator[int]:
    """Run all windows through decoder layer ``index``, held; yields the tokens done.

    What enters it comes from the spill, but for the first layer; what it returns goes there, but
    for the last.
    """
    torch = need("torch")
    before = state.hidden(index) if index else None  # [tokens, d]
    with ExitStack() as stack:
        file = None
        if index + 1 < skeleton.found.n_layers:
            file = stack.enter_context(state.writing(index + 1))
        start = 0
        for batch in batches(windows.tokens):
            ids = torch.from_numpy(np.stack(batch))
            end = start + ids.numel()
            below = None
            if before is not None:
                below = torch.from_numpy(before[start:end].reshape(*ids.shape, -1).copy())
            above = skeleton.run(index, ids, below).flatten(0, 1).contiguous().numpy()
            if file is not None:
                if start == 0:
                    _write_header(file, (windows.fed, above.shape[1]))
                file.write(above.data)
            start = end
            yield end


def _write_header(file: BinaryIO, shape: tuple[int, int]) -> None:
    """The start of a ``.npy`` file of float32 [tokens, d]."""
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _norms(experts: Experts) -> Floats:
    both = [experts.norms(expert) for expert in range(experts.n_experts)]
    return np.stack([np.stack([pair[i].numpy() for pair in both]) for i in (0, 1)])


class _Spill:
    """The folder of a calibration under way.

    ``hidden-I.npy`` is what enters layer I. ``sums-I.npz`` is written after ``hidden-(I+1).npy``
    and before ``hidden-I.npy`` is removed: it says that layer I is finished.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._folder = folder
        label = folder / "source"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            known = label.read_text() if label.exists() else fingerprint
            for part in folder.glob(".hidden-*.part"):  # of a run that was killed
                part.unlink()
        except OSError as error:
            raise CrispError(f"{folder}: cannot be used: {error.strerror or error}") from error
        if known != fingerprint:
            raise CrispError(
                f"{folder}: holds a calibration begun with other weights or other text; "
                "remove it or name another folder"
            )
        with atomic(label) as temporary:
            temporary.write_text(fingerprint)

    @contextmanager
    def writing(self, index: int) -> Iterator[BinaryIO]:
        """The file of what enters layer ``index``: there when the block has ended well."""
        with atomic(self._path("hidden", index)) as temporary, temporary.open("wb") as file:
            yield file

    def hidden(self, index: int) -> NDArray[np.float32]:
        """What enters layer ``index``, mapped: [tokens, d]."""
        return self._array(self._path("hidden", index), mmap_mode="r")

    def finish(self, index: int, sums: LayerSums | None, norms: Floats | None) -> None:
        if norms is not None:
            with atomic(self._path("norms", index)) as temporary, temporary.open("wb") as file:
                np.save(file, norms)
        Calibration({} if sums is None else {index: sums}).save(self._path("sums", index))
        self._path("hidden", index).unlink(missing_ok=True)

    def finished(self, index: int) -> bool:
        if not self._path("sums", index).exists():
            return False
        self._path("hidden", index).unlink(missing_ok=True)  # the kill may have come before that
        return True

    def sums(self, index: int) -> LayerSums:
        return Calibration.load(self._path("sums", index)).layers[index]

    def norms(self, index: int) -> Floats:
        return self._array(self._path("norms", index))

    def _path(self, what: str, index: int) -> Path:
        return self._folder / f"{what}-{index}.{'npz' if what == 'sums' else 'npy'}"

    def _array(self, path: Path, mmap_mode: Literal["r"] | None = None) -> NDArray[Any]:
        try:
            found: NDArray[Any] = np.load(path, mmap_mode)
        except (OSError, ValueError, EOFError) as error:
            raise CrispError(f"{path}: cannot be read; remove {path.parent}: {error}") from error
        return found


def _fingerprint(folder: Path, tokens: Sequence[Ints]) -> str:
    """Of the checkpoint's files, by size and time, and of the tokens."""
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(json.dumps(stats).encode())
    for window in tokens:
        digest.update(np.array([len(window), *window], np.int64).tobytes())
    return digest.hexdigest()
