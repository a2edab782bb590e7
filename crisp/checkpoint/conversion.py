"""A checkpoint's tensors as the model has them in memory: experts fused, names of its modules.

The rules are transformers' own, those by which it loads a model. Here they are applied to some of
the tensors at a time, to experts one after the other. Reading maps the files, so that what is on
disk takes no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors import SafetensorError, safe_open

from crisp.checkpoint.files import Checkpoint
from crisp.errors import CrispError
from crisp.extras import need

Read = Callable[[str], Any]  # name in the checkpoint -> tensor


@dataclass(eq=False)
class _Piece:
    """Tensors of the checkpoint that become one tensor of the model, or several."""

    target: str  # the first of them
    converter: Any  # transformers' WeightConverter; None: the tensor as it is
    sources: dict[str, list[str]] = field(default_factory=dict)  # by pattern of the converter
    stacked: bool = False  # entry e of the result comes from the e-th of each pattern's alone

    def __str__(self) -> str:
        names = [name for each in self.sources.values() for name in each]
        return f"tensor {names[0]!r}" + (f" and {len(names) - 1} like it" if names[1:] else "")


class Conversion:
    """From ``checkpoint`` to ``model``, which is on the meta device and stays there.

    Raises CrispError, naming folder and tensor, if some are missing, left over, of another shape
    than the config says, or there in two spellings; nothing is read for that.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        self._model, self._checkpoint = model, checkpoint
        self._empty: dict[str, Any] = dict(model.state_dict())  # name in the model -> meta tensor
        self._pieces = self._plan()

    def tensors(self, names: Collection[str]) -> Iterator[tuple[str, Any]]:
        """(name, tensor) of these tensors of the model, in memory, in the type the model has."""
        torch = need("torch")
        with self._reader() as read:
            for piece in self._pieces.values():
                if piece.target in names and piece.stacked:
                    whole = torch.empty_like(self._empty[piece.target], device="cpu")
                    for part in range(len(whole)):
                        whole[part].copy_(self._convert(piece, part, read)[piece.target][0])
                    yield piece.target, whole
                elif piece.target in names:
                    for name, tensor in self._convert(piece, None, read).items():
                        whole = torch.empty_like(self._empty[name], device="cpu")
                        yield name, whole.copy_(tensor)

    def mapped(self, name: str) -> Any:
        """This tensor of the model as it lies in its file, in its type there; None if it does not
        lie there as it is.
        """
        piece = self._pieces.get(name)
        if piece is None or piece.converter is not None:
            return None
        with self._reader() as read:
            return self._convert(piece, None, read)[name]

    def _plan(self) -> dict[str, _Piece]:
        """By the (first) tensor of the model that is made, what it is made from."""
        loading = need("transformers.core_model_loading")
        rules = need("transformers.conversion_mapping").get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        base, pieces, unknown = self._model.base_model_prefix, dict[str, _Piece](), set[str]()
        for name in sorted(self._checkpoint.tensors, key=loading.dot_natural_key):
            target, pattern = loading.rename_source_key(
                name, renamings, converters, base, self._empty
            )
            if target not in self._empty and name in self._empty:  # is in that spelling already
                target, pattern = name, None
            if target not in self._empty:
                unknown.add(target)
                continue
            piece = pieces.setdefault(target, _Piece(target, by_pattern.get(pattern)))
            if piece.converter is not by_pattern.get(pattern) or (piece.sources and not pattern):
                raise CrispError(
                    f"{self._checkpoint.where(name)}: makes {target}, and so does {piece}"
                )
            piece.sources.setdefault(pattern or name, []).append(name)
        self._check(pieces, unknown)
        return pieces

    def _check(self, pieces: dict[str, _Piece], unknown: set[str]) -> None:
        folder, made = self._checkpoint.folder, set[str]()
        for piece in pieces.values():
            for target, shape in self._shapes(piece).items():
                made.add(target)
                expected = self._empty[target].shape
                if shape != expected:
                    raise CrispError(
                        f"{folder}: {piece}: {target} becomes {list(shape)}; {list(expected)} was "
                        "expected from the config"
                    )
        missing = self._empty.keys() - made - self._model.all_tied_weights_keys.keys()
        keys = SimpleNamespace(missing_keys=missing, unexpected_keys=unknown)
        self._model._adjust_missing_and_unexpected_keys(keys)  # each family knows exceptions
        if keys.missing_keys:
            raise CrispError(f"{folder}: lacks the model's {min(keys.missing_keys)}")
        if keys.unexpected_keys:
            raise CrispError(
                f"{folder}: holds {min(keys.unexpected_keys)}, which the model does not have"
            )

    def _shapes(self, piece: _Piece) -> dict[str, Any]:
        """What becomes of a piece; finds out on the way whether it can be made in parts."""
        torch, tensors = need("torch"), self._checkpoint.tensors

        def read(name: str) -> Any:
            return torch.empty(tensors[name].shape, device="meta")

        expected = self._empty[piece.target].shape
        counts = {len(names) for names in piece.sources.values()}
        alike = all(
            len({tensors[name].shape for name in names}) == 1 for names in piece.sources.values()
        )
        if piece.converter is not None and alike and counts == {expected[0]}:
            part = {name: one.shape for name, one in self._convert(piece, 0, read).items()}
            piece.stacked = part == {piece.target: (1, *expected[1:])}
        if piece.stacked:
            return {piece.target: expected}
        return {name: one.shape for name, one in self._convert(piece, None, read).items()}

    def _convert(self, piece: _Piece, part: int | None, read: Read) -> dict[str, Any]:
        """The tensors of the model that a piece becomes, or entry ``part`` of a stacked one."""
        if piece.converter is None:
            (names,) = piece.sources.values()
            return {piece.target: read(names[0])}
        converter = deepcopy(piece.converter)
        for pattern, names in piece.sources.items():
            for name in names if part is None else names[part : part + 1]:
                converter.add_tensor(piece.target, name, pattern, read(name))
        try:
            made = converter.convert(piece.target, model=self._model, config=self._model.config)
        except (RuntimeError, ValueError, IndexError) as error:
            raise CrispError(
                f"{self._checkpoint.folder}: {piece}: cannot become {piece.target}: "
                f"{' '.join(str(error).split())[:120]}"
            ) from error
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}

    @contextmanager
    def _reader(self) -> Iterator[Read]:
        """``read(name)`` gives a tensor of the checkpoint, mapped from its file."""
        opened = dict[Path, Any]()
        with ExitStack() as stack:

            def read(name: str) -> Any:
                path = self._checkpoint.folder / self._checkpoint.tensors[name].shard
                try:
                    if path not in opened:
                        opened[path] = stack.enter_context(safe_open(path, "pt"))
                    return opened[path].get_tensor(name)
                except (OSError, SafetensorError) as error:
                    raise CrispError(f"{path}: cannot be read: {error}") from error

            yield read
