"""What a GGUF file says, and one line for each way in which it cannot be."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")

from crisp.checkpoint.gguf import gguf_file, read_header, refuse_gguf  # noqa: E402
from crisp.errors import CrispError  # noqa: E402
from crisp.model.gguf_header import TYPES  # noqa: E402
from tests.crisp.checkpoint.gguf.made import D_FF, EXPERTS, D, write  # noqa: E402


def test_sizes_of_types_are_the_packages() -> None:
    for number, (name, block, size) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name
        assert gguf.GGML_QUANT_SIZES[kind] == (block, size)


def test_fields_and_tensors(tmp_path: Path) -> None:
    stored = write(tmp_path / "m.gguf")
    header = read_header(tmp_path / "m.gguf")
    assert header.fields["general.architecture"] == "qwen3moe"
    assert header.fields["qwen3moe.expert_count"] == EXPERTS
    assert header.fields["tokenizer.ggml.scores"] == [0.5, 1.5]
    assert "tokenizer.ggml.tokens" not in header.fields
    data = (tmp_path / "m.gguf").read_bytes()
    for name, (kind, content) in stored.items():
        tensor = header.tensors[name]
        assert tensor.kind == kind
        assert data[tensor.offset : tensor.offset + tensor.nbytes] == content.tobytes()
    assert header.tensors["blk.1.ffn_down_exps.weight"].shape == (EXPERTS, D, D_FF)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert theirs.keys() == header.tensors.keys()
    for name, tensor in header.tensors.items():
        assert tensor.offset == theirs[name].data_offset
        assert tensor.nbytes == theirs[name].n_bytes
        assert list(tensor.shape) == list(reversed(theirs[name].shape.tolist()))


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(CrispError) as error:
        read_header(path)
    line = str(error.value)
    assert "\n" not in line
    assert line.startswith(str(path))
    return line


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path, layers=1)
    whole = path.read_bytes()
    header = read_header(path)
    end = min(tensor.offset for tensor in header.tensors.values())
    for length in [*range(0, end, 7), end, len(whole) // 2, len(whole) - 32]:
        refusal(path, whole[:length])


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def file(*fields: bytes, tensors: tuple[bytes, ...] = (), **counts: int) -> bytes:
    n_tensors, n_fields = counts.get("tensors_", len(tensors)), counts.get("fields_", len(fields))
    first = b"GGUF" + struct.pack("<IQQ", counts.get("version", 3), n_tensors, n_fields)
    return (first + b"".join(fields) + b"".join(tensors)).ljust(4096, b"\0")


def tensor(dims: list[int], kind: int = 0, offset: int = 0, name: bytes = b"blk.0.x") -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no GGUF file"),
        (b"GGUF\x03\0\0\0", "is cut off: 8 bytes"),
        (b"GGML" + bytes(100), "is no GGUF file"),
        (file(version=1), "is GGUF of version 1; 2 or 3"),
        (file(version=3 << 24), "is GGUF of version 50331648"),
        (file(tensors_=1 << 62), "says 4,611,686,018,427,387,904 tensors, too many"),
        (file(fields_=1 << 62), "fields, too many for its 4,096 bytes"),
        (file(text(b"x") + struct.pack("<IIQ", 9, 8, 1 << 60)), "texts in x, too many"),
        (file(text(b"x") + struct.pack("<IIQ", 9, 10, 1 << 61)), "numbers in x, too many"),
        (file(text(b"x") + struct.pack("<IIQ", 9, 9, 1)), "'x' is of type 9"),
        (file(text(b"x") + struct.pack("<I", 77)), "'x' is of type 77"),
        (file(text(b"x") + struct.pack("<IQ", 8, 1 << 50)), "is cut off"),
        (file(struct.pack("<Q", 1 << 40)), "a name of 1,099,511,627,776 bytes"),
        (file(tensors=(tensor([1 << 40, 1 << 40]),)), "is no shape of F32"),
        (file(tensors=(tensor([0, 5]),)), "is no shape of F32"),
        (file(tensors=(tensor([100], kind=12),)), r"\[100\] is no shape of Q4_K"),
        (file(tensors=(tensor([1 << 20]),)), "ends at byte 4,194,.*cut off, or damaged"),
        (file(tensors=(tensor([4], offset=1 << 63),)), "cut off, or damaged"),
        (file(tensors=(tensor([4], offset=3),)), "begins at byte 3 of the data, no multiple of 32"),
        (
            file(tensors=(tensor([99], name=b"a"), tensor([4], offset=32, name=b"b"))),
            "tensor 'b' begins inside 'a', at byte",
        ),
        (file(tensors=(tensor([4], kind=999),)), "ggml's type 999"),
        (file(tensors=(tensor([1] * 9),)), "has 9 axes"),
        (file(tensors=(tensor([4]), tensor([4]))), "has the tensor 'blk.0.x' twice"),
        (
            file(text(b"general.alignment") + struct.pack("<II", 4, 3)),
            "general.alignment is 3, a power of two",
        ),
    ],
)
def test_one_line_and_nothing_allocated(tmp_path: Path, content: bytes, words: str) -> None:
    import re

    assert re.search(words, refusal(tmp_path / "m.gguf", content))


def test_random_damage_is_never_a_traceback(tmp_path: Path) -> None:
    path, random = tmp_path / "m.gguf", np.random.default_rng(0)
    write(path, layers=1)
    whole = path.read_bytes()
    end = min(tensor.offset for tensor in read_header(path).tensors.values())
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for at in random.integers(0, end, 3):
            damaged[at] = random.integers(0, 256)
        path.write_bytes(damaged)
        try:
            read_header(path)
        except CrispError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 50


def split(folder: Path, name: str, parts: int) -> list[Path]:
    """Write a file in parts by hand: fields in each, the tensors dealt out."""
    paths = []
    for part in range(parts):
        path = folder / f"{name}-{part + 1:05}-of-{parts:05}.gguf"
        writer: Any = gguf.GGUFWriter(path, "qwen3moe")
        writer.add_uint16("split.count", parts)
        writer.add_uint16("split.no", part)
        writer.add_tensor(f"blk.{part}.x", np.full(8, part, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def test_a_split_file(tmp_path: Path) -> None:
    first, second = split(tmp_path, "m", 2)
    tensors = read_header(first).tensors
    assert [tensors[f"blk.{part}.x"].path for part in (0, 1)] == [first, second]
    assert gguf_file(tmp_path) == first
    with pytest.raises(CrispError, match="a part of a file split in 2; the first, NAME-00001-of-"):
        read_header(second)
    second.unlink()
    with pytest.raises(CrispError, match=r"m-00002-of-00002\.gguf: is missing"):
        read_header(first)


def test_a_model_to_be_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "m.gguf"):
        with pytest.raises(CrispError, match="is a GGUF model, of which crisp pack reads"):
            refuse_gguf(path)
    (tmp_path / "config.json").write_text("{}")
    refuse_gguf(tmp_path)


def test_which_file_of_a_folder(tmp_path: Path) -> None:
    assert gguf_file(tmp_path) is None
    assert gguf_file(tmp_path / "missing.gguf") is None
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert gguf_file(tmp_path / "b.gguf") == tmp_path / "b.gguf"
    with pytest.raises(CrispError, match=r"holds 2 GGUF files, such as a\.gguf; name one"):
        gguf_file(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert gguf_file(tmp_path) is None
