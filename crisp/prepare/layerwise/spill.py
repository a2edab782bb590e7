"""What lies on the disk while a model is calibrated layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from crisp.errors import CrispError
from crisp.files import atomic
from crisp.prepare.calibration import CalibrationSums, Floats, LayerSums


def write_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    """Write the start of a ``.npy`` file of float32 ``shape``."""
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


class SpillFolder:
    """The folder of a running calibration.

    ``hidden-I.npy`` is the input of layer I, [tokens, d], and ``copies-I.npy`` that of several runs
    of the model side by side, [runs, tokens, d] (see `LayerwiseSaliency`). ``sums-I.npz`` is
    written after those of I + 1 and before those of I are removed: it marks layer I as finished.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._folder = folder
        label = folder / "source"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            labelled = label.read_text() if label.exists() else fingerprint
            for part in [*folder.glob(".hidden-*.part"), *folder.glob(".copies-*.part")]:
                part.unlink()  # of a run that was killed
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
    def writing(self, what: str, index: int) -> Iterator[BinaryIO]:
        """Open an input file of layer ``index``; it appears when the block ends without error."""
        with atomic(self._path(what, index)) as temporary, temporary.open("wb") as file:
            yield file

    def mapped(self, what: str, index: int) -> NDArray[np.float32] | None:
        """Return an input of layer ``index``, mapped: float32 [..., tokens, d]; of layer 0 None."""
        return self.array(what, index, mmap_mode="r") if index else None

    def save(self, what: str, index: int, array: NDArray[Any]) -> None:
        """Write an array that was measured of a layer."""
        with self.writing(what, index) as file:
            np.save(file, array)

    def array(self, what: str, index: int, mmap_mode: Literal["r"] | None = None) -> NDArray[Any]:
        """Read what `save` wrote."""
        path = self._path(what, index)
        try:
            array: NDArray[Any] = np.load(path, mmap_mode)
        except (OSError, ValueError, EOFError) as error:
            raise CrispError(f"{path}: cannot be read; remove {path.parent}: {error}") from error
        return array

    def finish(self, index: int, sums: LayerSums | None, norms: Floats | None) -> None:
        """Save what a layer left (None: it has no experts) and mark it as finished."""
        if norms is not None:
            self.save("norms", index, norms)
        CalibrationSums({} if sums is None else {index: sums}).save(self._path("sums", index))
        self._remove_inputs(index)

    def finished(self, index: int) -> bool:
        """Return whether a layer is finished, and remove its input if it is."""
        if not self._path("sums", index).exists():
            return False
        self._remove_inputs(index)  # a kill may have prevented that
        return True

    def _remove_inputs(self, index: int) -> None:
        for what in ("hidden", "copies"):
            self._path(what, index).unlink(missing_ok=True)

    def sums(self, index: int) -> LayerSums:
        return CalibrationSums.load(self._path("sums", index)).layers[index]

    def _path(self, what: str, index: int) -> Path:
        return self._folder / f"{what}-{index}.{'npz' if what == 'sums' else 'npy'}"
