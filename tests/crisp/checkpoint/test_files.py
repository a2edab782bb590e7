"""Checkpoints read from their headers, and everything that can be wrong with them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file

from crisp.checkpoint.files import open_checkpoint, refuse_prepared, weights_digest
from crisp.errors import CrispError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TENSORS: dict[str, Any] = {
    "b.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.weight": np.arange(4, dtype=np.float16),
    "c": np.array(7, np.int64),
    "none": np.zeros((0, 5), np.float32),
}


def write(folder: Path, *shards: Mapping[str, Any]) -> Path:
    """A checkpoint of one file, or of several and their index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    if len(shards) == 1:
        save_file(dict(shards[0]), folder / SINGLE)
        return folder
    names = [f"model-{i}-of-{len(shards)}.safetensors" for i in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        save_file(dict(tensors), folder / name)
    named = {x: name for name, tensors in zip(names, shards, strict=True) for x in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": named}))
    return folder


def split(*names: str) -> dict[str, Any]:
    return {name: TENSORS[name] for name in names}


def in_two(folder: Path) -> Path:
    return write(folder, split("c", "a.weight"), split("b.weight", "none"))


@pytest.mark.parametrize("make", [lambda path: write(path, TENSORS), in_two])
def test_every_tensor_is_where_the_header_says(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    checkpoint = open_checkpoint(make(tmp_path))
    assert set(checkpoint.tensors) == set(TENSORS)
    for name, value in TENSORS.items():
        tensor = checkpoint.tensors[name]
        raw = (tmp_path / tensor.shard).read_bytes()
        assert raw[tensor.offset : tensor.offset + tensor.nbytes] == value.tobytes()
        assert (tensor.name, tensor.shape) == (name, value.shape)
    assert [checkpoint.tensors[name].dtype for name in TENSORS] == ["F32", "F16", "I64", "F32"]
    for shard in checkpoint.shards:
        offsets = [tensor.offset for tensor in checkpoint.tensors_of(shard)]
        assert offsets == sorted(offsets)


def test_one_file_has_no_index(tmp_path: Path) -> None:
    one, two = open_checkpoint(write(tmp_path / "1", TENSORS)), open_checkpoint(in_two(tmp_path))
    assert (one.shards, one.index) == ((SINGLE,), None)
    assert two.shards == ("model-0-of-2.safetensors", "model-1-of-2.safetensors")
    assert two.index == INDEX


# -- what identifies the weights -------------------------------------------------------------------


def test_the_digest_is_that_of_names_types_shapes_and_bytes(tmp_path: Path) -> None:
    lines = ""
    for name, dtype in (("a.weight", "F16"), ("b.weight", "F32"), ("c", "I64"), ("none", "F32")):
        digest = xxhash.xxh3_128(TENSORS[name].tobytes()).hexdigest()
        lines += json.dumps([name, dtype, list(TENSORS[name].shape), digest]) + "\n"
    expected = hashlib.sha256(lines.encode()).hexdigest()
    assert weights_digest(write(tmp_path / "one", TENSORS)) == expected
    assert weights_digest(in_two(tmp_path / "two")) == expected
    three = write(tmp_path / "three", split("none"), split("c"), split("a.weight", "b.weight"))
    assert weights_digest(three) == expected


def test_the_digest_does_not_see_what_crisp_adds(tmp_path: Path) -> None:
    folder = write(tmp_path, TENSORS)
    before = weights_digest(folder)
    save_file({"x": np.zeros(3)}, folder / "crisp.safetensors")
    assert weights_digest(folder) == before


@pytest.mark.parametrize(
    "change",
    [
        {"b.weight": TENSORS["b.weight"] + np.eye(2, 3, dtype=np.float32)},
        {"b.weight": TENSORS["b.weight"].T.copy()},
        {"b.weight": TENSORS["b.weight"].reshape(3, 2)},
        {"b.weight": TENSORS["b.weight"].view(np.int32)},
        {"d": TENSORS["c"]},
        {"none": np.zeros((5, 0), np.float32)},
    ],
)
def test_the_digest_changes_with_anything(tmp_path: Path, change: dict[str, Any]) -> None:
    same = weights_digest(write(tmp_path / "same", TENSORS))
    assert weights_digest(write(tmp_path / "other", {**TENSORS, **change})) != same


def test_the_digest_of_a_tensor_of_many_tiles(tmp_path: Path) -> None:
    value = np.random.default_rng(0).random(123_457)  # 988 kB
    done: list[tuple[int, int]] = []
    expected = xxhash.xxh3_128(value.tobytes()).hexdigest()
    line = json.dumps(["x", "F64", [123_457], expected]) + "\n"
    folder = write(tmp_path, {"x": value})
    digest = weights_digest(folder, lambda *counts: done.append(counts))
    assert digest == hashlib.sha256(line.encode()).hexdigest()
    assert done == [(987_656, 987_656)]


# -- bad input: one line that names the file and the tensor ----------------------------------------


def header(path: Path, entries: object, data: bytes = b"") -> None:
    text = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def reindexed(folder: Path, **change: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].update(change)
    (folder / INDEX).write_text(json.dumps(index))


def entry(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


SECOND = "model-1-of-2.safetensors"
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no shard": (
        lambda f: (f / SECOND).unlink(),
        rf"{SECOND}: is missing; {INDEX} places 2 tensors there, such as 'b.weight'",
    ),
    "absent tensor": (
        lambda f: reindexed(f, extra=SECOND),
        rf"{SECOND}: lacks 'extra', which {INDEX} places there",
    ),
    "misplaced tensor": (
        lambda f: reindexed(f, c=SECOND),
        r"model-0-of-2.safetensors: holds 'c', which .* does not place there",
    ),
    "unnamed tensor": (
        lambda f: save_file({**split("b.weight", "none"), "d": np.zeros(2)}, f / SECOND),
        rf"{SECOND}: holds 'd', which {INDEX} does not place there",
    ),
    "cut off": (lambda f: cut(f / SECOND, 1), rf"{SECOND}: is not a whole safetensors file"),
    "too long": (
        lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes() + b"x"),
        rf"{SECOND}: is not a whole safetensors file",
    ),
    "empty": (lambda f: (f / SECOND).write_bytes(b""), rf"{SECOND}: is not a whole"),
    "a folder": (
        lambda f: ((f / SECOND).unlink(), (f / SECOND).mkdir()),
        rf"{SECOND}: is not a file",
    ),
    "huge header": (
        lambda f: (f / SECOND).write_bytes(struct.pack("<Q", 1 << 62) + b"{}"),
        rf"{SECOND}: is not a whole",
    ),
    "header of another kind": (lambda f: header(f / SECOND, [1]), rf"{SECOND}: is not a whole"),
    "header cut off": (lambda f: header(f / SECOND, b'{"b.w'), rf"{SECOND}: is not a whole"),
    "overlapping tensors": (
        lambda f: header(
            f / SECOND, {"b.weight": entry([2], 0, 8), "none": entry([2], 4, 12)}, bytes(12)
        ),
        rf"{SECOND}: is not a whole",
    ),
    "a hole": (
        lambda f: header(f / SECOND, {"b.weight": entry([2], 8, 16)}, bytes(16)),
        rf"{SECOND}: is not a whole",
    ),
    "shape and bytes": (
        lambda f: header(f / SECOND, {"b.weight": entry([3], 0, 8)}, bytes(8)),
        rf"{SECOND}: is not a whole",
    ),
    "unknown type": (
        lambda f: header(f / SECOND, {"b.weight": entry([2], 0, 8, "X7")}, bytes(8)),
        rf"{SECOND}: is not a whole",
    ),
    "both spellings": (
        lambda f: save_file(TENSORS, f / SINGLE),
        rf"has both {SINGLE} and {INDEX}; one of them was expected",
    ),
    "index is no JSON": (lambda f: (f / INDEX).write_text("{"), rf"{INDEX}: is no JSON file"),
    "index is a list": (lambda f: (f / INDEX).write_text("[]"), rf"{INDEX}: is no JSON object"),
    "index without names": (
        lambda f: (f / INDEX).write_text('{"weight_map": {}}'),
        rf"{INDEX}: has no weight_map",
    ),
    "index that leaves the folder": (
        lambda f: reindexed(f, c="../model.safetensors"),
        rf"{INDEX}: places 'c' in '../model.safetensors'; a file beside it was expected",
    ),
    "index of a number": (lambda f: reindexed(f, c=3), rf"{INDEX}: places 'c' in 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_naming_it(tmp_path: Path, case: str) -> None:
    folder = in_two(tmp_path)
    open_checkpoint(folder)
    spoil, message = WRONG[case]
    spoil(folder)
    with pytest.raises(CrispError, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(CrispError, match="is no folder"):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(CrispError, match="has no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CrispError, match=r"only pickled weights \(pytorch_model.bin\)"):
        open_checkpoint(tmp_path)


def test_names_of_tensors_never_break_the_line(tmp_path: Path) -> None:
    folder = in_two(tmp_path)
    reindexed(folder, **{"x\ny": SECOND})
    with pytest.raises(CrispError, match=r"lacks 'x\\ny'") as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_a_prepared_model_is_known_by_its_metadata(tmp_path: Path) -> None:
    folder = write(tmp_path, TENSORS)
    refuse_prepared(folder)
    (folder / "crisp.safetensors").touch()
    with pytest.raises(CrispError, match=f"{folder}: is prepared already"):
        refuse_prepared(folder)
    assert set(open_checkpoint(folder).tensors) == set(TENSORS)
