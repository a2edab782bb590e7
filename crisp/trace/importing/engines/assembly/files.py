"""Reading of the containers that logs come in: none is trusted, none can run code."""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from crisp.errors import CrispError, reason_of, shorten
from crisp.extras import import_extra

Array = NDArray[Any]

NPY, ZIP = b"\x93NUMPY", b"PK\x03\x04"  # how the files begin
_MOST = 1 << 32  # bytes of all arrays of a file


def read_npy(path: Path) -> Array:
    """Map the array of a .npy file; CrispError for one that is cut off or holds objects."""
    with path.open("rb") as file:
        _npy_header(file, path.stat().st_size, str(path))
    mapped: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped


def read_npz(path: Path) -> dict[str, Array]:
    """Return the arrays of a .npz file by name; CrispError for one that is broken or too large."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
            check_total(sum(member.file_size for member in members), str(path))
            arrays = {}
            for member in members:
                with archive.open(member) as file:
                    name = f"{path}: {shorten(member.filename)}"
                    arrays[member.filename.removesuffix(".npy")] = _read_npy_stream(
                        file, member.file_size, name
                    )
            return arrays
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise CrispError(f"{path}: not a whole .npz file ({reason_of(error)})") from error


def read_pt(path: Path) -> Any:
    """Return what ``torch.save`` wrote: tensors in lists and dictionaries, nothing else.

    Objects of other types are refused and never built, as unpickling them would run code.
    """
    torch = import_extra("torch")
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            check_total(sum(member.file_size for member in archive.infolist()), str(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on how the file was made
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CrispError(
            f"{path}: holds more than tensors, lists and numbers; nothing of it was run"
        ) from error
    except Exception as error:  # of torch's reader, which raises whatever a broken file leads to
        raise CrispError(f"{path}: not a whole .pt file ({reason_of(error)})") from error


def read_json(path: Path) -> Any:
    """Return the value of a JSON file; CrispError where it is none."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CrispError(f"{path}: not JSON ({reason_of(error)})") from error


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of each line that is not empty; CrispError for others."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                what = reason_of(error)
                raise CrispError(f"{path}: line {number} is not JSON ({what})") from error
            if not isinstance(value, dict):
                raise CrispError(f"{path}: line {number} is not a JSON object")
            yield number, value


def decode_base64(text: str, name: str) -> bytes:
    """Return the bytes that a text stands for; CrispError where it is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CrispError(f"{name}: not base64 ({reason_of(error)})") from error


def whole_array(value: Any, dimensions: int, name: str) -> NDArray[np.int64]:
    """Return nested lists, an array, a tensor or a base64 .npy as whole numbers of ``dimensions``.

    Raises CrispError that calls the value ``name`` for other shapes, texts and fractions.
    """
    if isinstance(value, str):
        payload = decode_base64(value, name)
        value = _read_npy_stream(io.BytesIO(payload), len(payload), name)
    array = to_array(value, name)
    if array.ndim != dimensions:
        raise CrispError(f"{name}: {list(array.shape)} found; expected {dimensions} dimensions")
    check_total(array.size * 8, name)
    if array.dtype.kind == "f":
        if not (np.isfinite(array) & (array == np.floor(array))).all():
            raise CrispError(f"{name}: a number is not whole")
    elif array.dtype.kind not in "iu" and array.size:
        raise CrispError(f"{name}: {array.dtype} found; expected whole numbers")
    if array.size and (array.max() > np.iinfo(np.int32).max or array.min() < -1):
        odd = array.max() if array.min() >= -1 else array.min()
        raise CrispError(f"{name}: {odd} found; expected -1 to {np.iinfo(np.int32).max}")
    return array.astype(np.int64)


def to_array(value: Any, name: str) -> Array:
    """Return nested lists, an array or a tensor as an array; CrispError where they are ragged."""
    if hasattr(value, "detach"):  # a tensor, and numpy has no bfloat16
        try:
            value = value.detach()
            # A tensor without strides is small in the file, whatever its shape.
            check_total(8 * int(value.numel()), name)
            value = (value.float() if value.is_floating_point() else value).cpu().numpy()
        except CrispError:
            raise
        except Exception as error:  # sparse, quantised, or on no device
            raise CrispError(f"{name}: not a plain tensor ({reason_of(error)})") from error
    try:
        return np.asarray(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise CrispError(f"{name}: its lists differ in length") from error


def is_text(head: bytes) -> bool:
    """Return whether the beginning of a file looks like text."""
    return bool(head) and b"\0" not in head


def _read_npy_stream(file: IO[bytes], size: int, name: str) -> Array:
    shape, fortran, dtype = _npy_header(file, size, name)
    data = file.read(dtype.itemsize * math.prod(shape))
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _npy_header(
    file: IO[bytes], size: int, name: str
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return (shape, Fortran order, type) of a .npy stream of ``size`` bytes, read up to its data.

    Raises CrispError unless its data is just as long as its shape says.
    """
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran, dtype = read(file)
        data = math.prod(shape) * dtype.itemsize
        here = file.tell()
    except Exception as error:  # of numpy's parser, which lets those of Python's pass
        raise CrispError(f"{name}: not a .npy array, or its header is damaged") from error
    if dtype.hasobject or dtype.itemsize == 0:
        raise CrispError(f"{name}: holds {dtype}; numbers were expected")
    no_shape = CrispError(f"{name}: {shorten(str(list(shape)))} is no shape of an array")
    if min(shape, default=0) < 0:
        raise no_shape
    if data > size - here:
        raise CrispError(
            f"{name}: {list(shape)} of {dtype} need {data:,} bytes, {size - here:,} are there"
        )
    # numpy refuses sizes beyond int64 even where another axis is 0
    if math.prod(n for n in shape if n) * dtype.itemsize >= 1 << 62:
        raise no_shape
    check_total(data, name)
    return shape, fortran, dtype


def check_total(size: int, name: str) -> None:
    """Raise CrispError for more bytes than a log may unpack to."""
    if size > _MOST:
        raise CrispError(f"{name}: {size:,} bytes unpacked are more than a log may have")
