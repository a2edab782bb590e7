"""Calibration of a model that is larger than memory, one decoder layer after the other.

All windows pass a layer before the next is read; between layers their hidden states lie on disk.
The sums are those of `crisp.prepare.calibration`, in the same batches, in float32.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from crisp.adapter import ExpertLayout, Experts, Handler, intercept_experts
from crisp.checkpoint.skeleton import Skeleton, open_skeleton
from crisp.errors import CrispError
from crisp.extras import import_extra
from crisp.files import atomic
from crisp.prepare.calibration import CalibrationSums, Floats, Ints, LayerSums, batch_windows
from crisp.prepare.importance import stack_norms
from crisp.progress import Progress, no_progress
from crisp.text_windows import TokenWindows


@dataclass(frozen=True, eq=False)
class NeuronNorms:
    """The norms of one layer's neurons, kept when its weights are no longer in memory.

    They stand in for `Experts` where only `Experts.norms` is needed.
    """

    name: str  # of the experts' module
    stacked: Floats  # [2, E, d_ff]: L2 norm of gate and up weights, and of the down row

    @property
    def n_experts(self) -> int:
        """Number of routed experts of the layer."""
        return int(self.stacked.shape[1])

    def norms(self, expert: int) -> tuple[Any, Any]:
        """Return what `Experts.norms` returned, [d_ff] each."""
        up, down = import_extra("torch").from_numpy(self.stacked[:, expert])
        return up, down


@dataclass(frozen=True, eq=False)
class LayerwiseCalibration:
    """What a calibration layer by layer returns."""

    layout: ExpertLayout  # of the model, without weights
    calibration: CalibrationSums
    norms: dict[int, NeuronNorms]  # by MoE layer


def calibrate_layerwise(
    folder: Path,
    windows: TokenWindows,
    spill: Path,
    progress: Progress = no_progress,
) -> LayerwiseCalibration:
    """Calibrate the model in ``folder`` on ``windows`` with one decoder layer in memory at a time.

    Memory holds at most one layer in float32, one batch and the sums. The folder ``spill`` (created
    if it does not exist) holds the float32 hidden states of every token before and after the layer,
    and the sums. After a kill the same call resumes at the first layer that was not finished; the
    result is the same to the bit. The folder may be removed afterwards.

    progress: called with (tokens times layers done, in all). Raises CrispError for what
    `open_skeleton` and `crisp.prepare.calibration.calibrate` refuse, for a ``spill`` of another
    calibration and for a full disk.
    """
    skeleton = open_skeleton(folder)
    spill_folder = _SpillFolder(spill, _fingerprint(folder, windows.tokens))
    layers = {layer.index: layer for layer in skeleton.layout.layers}
    n = skeleton.layout.n_layers
    for index in range(n):
        if spill_folder.finished(index):
            continue
        with skeleton.loaded_layer(index):
            experts = Experts.of(layers[index]) if index in layers else None
            sums = None
            if experts is not None:
                sums = LayerSums.empty(experts.n_experts, experts.d_ff, experts.d_model)
            handler = _summing_handler(experts, sums)
            with (
                import_extra("torch").inference_mode(),
                intercept_experts(skeleton.layout, handler),
            ):
                for done in _pass(skeleton, index, windows, spill_folder):
                    progress(index * windows.n_fed + done, n * windows.n_fed)
            spill_folder.finish(index, sums, None if experts is None else stack_norms(experts))
    calibration = CalibrationSums({}, len(windows.tokens), windows.n_fed)
    norms: dict[int, NeuronNorms] = {}
    for index, layer in layers.items():
        calibration.layers[index] = spill_folder.sums(index)
        norms[index] = NeuronNorms(layer.name, spill_folder.norms(index))
    return LayerwiseCalibration(skeleton.layout, calibration, norms)


def _summing_handler(experts: Experts | None, sums: LayerSums | None) -> Handler:
    """Return a handler that computes one layer's experts and adds to its sums."""

    def handler(_: int, hidden: Any, index: Any, weights: Any, __: Any) -> Any:
        assert experts is not None and sums is not None  # it is called in an MoE layer only
        return sums.run(experts, hidden, index, weights)

    return handler


def _pass(
    skeleton: Skeleton, index: int, windows: TokenWindows, spill: _SpillFolder
) -> Iterator[int]:
    """Run all windows through decoder layer ``index``, which is loaded; yield the tokens done.

    The input is read from the spill folder (the first layer has none), and the output is written
    there (the last layer's is not needed).
    """
    torch = import_extra("torch")
    before = spill.hidden(index) if index else None  # [tokens, d]
    with ExitStack() as stack:
        file = None
        if index + 1 < skeleton.layout.n_layers:
            file = stack.enter_context(spill.writing(index + 1))
        start = 0
        for batch in batch_windows(windows.tokens):
            ids = torch.from_numpy(np.stack(batch))
            end = start + ids.numel()
            below = None  # [windows, length, d]
            if before is not None:
                below = torch.from_numpy(before[start:end].reshape(*ids.shape, -1).copy())
            above = skeleton.run_layer(index, ids, below).flatten(0, 1).contiguous().numpy()
            if file is not None:
                if start == 0:
                    _write_header(file, (windows.n_fed, above.shape[1]))
                file.write(above.data)
            start = end
            yield end


def _write_header(file: BinaryIO, shape: tuple[int, int]) -> None:
    """Write the start of a ``.npy`` file of float32 ``shape``, [tokens, d]."""
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


class _SpillFolder:
    """The folder of a running calibration.

    ``hidden-I.npy`` is the input of layer I. ``sums-I.npz`` is written after ``hidden-(I+1).npy``
    and before ``hidden-I.npy`` is removed: it marks layer I as finished.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._folder = folder
        label = folder / "source"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            labelled = label.read_text() if label.exists() else fingerprint
            for part in folder.glob(".hidden-*.part"):  # of a run that was killed
                part.unlink()
        except OSError as error:
            raise CrispError(f"{folder}: cannot be used: {error.strerror or error}") from error
        if labelled != fingerprint:
            raise CrispError(
                f"{folder}: holds a calibration begun with other weights or other text; "
                "remove it or name another folder"
            )
        with atomic(label) as temporary:
            temporary.write_text(fingerprint)

    @contextmanager
    def writing(self, index: int) -> Iterator[BinaryIO]:
        """Open the input file of layer ``index``; it appears when the block ends without error."""
        with atomic(self._path("hidden", index)) as temporary, temporary.open("wb") as file:
            yield file

    def hidden(self, index: int) -> NDArray[np.float32]:
        """Return the input of layer ``index``, mapped: float32 [tokens, d]."""
        return self._array(self._path("hidden", index), mmap_mode="r")

    def finish(self, index: int, sums: LayerSums | None, norms: Floats | None) -> None:
        """Save what a layer left (None: it has no experts) and mark it as finished."""
        if norms is not None:
            with atomic(self._path("norms", index)) as temporary, temporary.open("wb") as file:
                np.save(file, norms)
        CalibrationSums({} if sums is None else {index: sums}).save(self._path("sums", index))
        self._path("hidden", index).unlink(missing_ok=True)

    def finished(self, index: int) -> bool:
        """Return whether a layer is finished, and remove its input if it is."""
        if not self._path("sums", index).exists():
            return False
        self._path("hidden", index).unlink(missing_ok=True)  # a kill may have prevented that
        return True

    def sums(self, index: int) -> LayerSums:
        return CalibrationSums.load(self._path("sums", index)).layers[index]

    def norms(self, index: int) -> Floats:
        return self._array(self._path("norms", index))

    def _path(self, what: str, index: int) -> Path:
        return self._folder / f"{what}-{index}.{'npz' if what == 'sums' else 'npy'}"

    def _array(self, path: Path, mmap_mode: Literal["r"] | None = None) -> NDArray[Any]:
        try:
            array: NDArray[Any] = np.load(path, mmap_mode)
        except (OSError, ValueError, EOFError) as error:
            raise CrispError(f"{path}: cannot be read; remove {path.parent}: {error}") from error
        return array


def _fingerprint(folder: Path, tokens: Sequence[Ints]) -> str:
    """Return a hash of the checkpoint's files, by size and time, and of the tokens."""
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(json.dumps(stats).encode())
    for window in tokens:
        digest.update(np.array([len(window), *window], np.int64).tobytes())
    return digest.hexdigest()
