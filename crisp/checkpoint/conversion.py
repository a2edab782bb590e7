"""The tensors of a model, made from those of its checkpoint: experts fused, modules' names.

The rules are transformers' own, those by which it loads a model. Here they are applied to some of
the tensors at a time, to experts one after the other. The files are mapped, so that what is on disk
takes no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors import SafetensorError, safe_open

from crisp.checkpoint.files import Checkpoint, TensorEntry, is_other_part
from crisp.checkpoint.meta_device import shapes_only
from crisp.checkpoint.quantised import DecodedCheckpoint
from crisp.errors import CrispError
from crisp.extras import import_extra

FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""torch's names of the types of weights, by safetensors'."""

ReadTensor = Callable[[str], Any]
"""``read(name in the checkpoint) -> tensor``"""


@dataclass(eq=False)
class TensorGroup:
    """Tensors of the checkpoint that together become one or several tensors of the model."""

    target: str  # name of the first tensor of the model
    converter: Any  # transformers' WeightConverter; None: the tensor as it is
    sources: dict[str, list[str]] = field(default_factory=dict)  # names, by converter pattern
    stacked: bool = False  # entry e of the result comes from the e-th of each pattern's alone

    def __str__(self) -> str:
        names = [name for sources in self.sources.values() for name in sources]
        return f"tensor {names[0]!r}" + (f" and {len(names) - 1} like it" if names[1:] else "")

    def may_be_stacked(self, count: int, tensors: Mapping[str, TensorEntry]) -> bool:
        """Return whether each pattern has ``count`` tensors, all of one shape."""
        return self.converter is not None and all(
            len(names) == count and len({tensors[name].shape for name in names}) == 1
            for names in self.sources.values()
        )

    def convert(self, model: Any, part: int | None, read: ReadTensor) -> dict[str, Any]:
        """Return the tensors that the group becomes, or those of entry ``part`` alone.

        Raises ConversionError if the rule does not take what ``read`` returns.
        """
        if self.converter is None:
            (names,) = self.sources.values()
            return {self.target: read(names[0])}
        converter = deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names if part is None else names[part : part + 1]:
                converter.add_tensor(self.target, name, pattern, read(name))
        try:
            tensors = converter.convert(self.target, model=model, config=model.config)
        except (RuntimeError, ValueError, IndexError) as error:
            reason = " ".join(str(error).split())[:120]
            raise ConversionError(f"cannot become {self.target}: {reason}") from error
        return {name: x[0] if isinstance(x, list) else x for name, x in tensors.items()}


class ConversionError(Exception):
    """A rule that does not take the tensors it was given; says what they cannot become."""


def tensor_groups(
    model: Any, checkpoint: Checkpoint
) -> tuple[dict[str, TensorGroup], dict[str, str]]:
    """Return the groups of a checkpoint's tensors by the (first) tensor of the model they become.

    Then the rest: the name that the model's rules give a tensor, and its own. What belongs to
    decoder layers that the model does not have (they predict further tokens), or to what reads
    images or sound, is left out. Raises CrispError for a tensor that is there in two spellings.
    """
    loading = import_extra("transformers.core_model_loading")
    rules = import_extra("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    base, empty = model.base_model_prefix, model.state_dict()
    groups, unknown = dict[str, TensorGroup](), dict[str, str]()
    for name in sorted(checkpoint.tensors, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, base, empty)
        if target not in empty and name in empty:  # is in that spelling already
            target, pattern = name, None
        if target not in empty:
            unknown.setdefault(target, name)
            continue
        group = groups.setdefault(target, TensorGroup(target, by_pattern.get(pattern)))
        if group.converter is not by_pattern.get(pattern) or (group.sources and not pattern):
            raise CrispError(f"{checkpoint.where(name)}: makes {target}, and so does {group}")
        group.sources.setdefault(pattern or name, []).append(name)
    return groups, {
        target: name
        for target, name in unknown.items()
        if not _beyond(model, target) and not is_other_part(name)
    }


def _beyond(model: Any, name: str) -> bool:
    """Return whether a tensor is of a layer behind the last of the model's decoder layers."""
    stack, _, rest = name.partition(".layers.")
    number = rest.partition(".")[0]
    try:
        layers = model.get_submodule(f"{stack}.layers")
    except AttributeError:
        return False
    return number.isdecimal() and int(number) >= len(layers)


class Conversion:
    """Converts the tensors of ``checkpoint`` to those of ``model``, which stays on the meta device.

    Raises CrispError, naming folder and tensor, if tensors are missing, left over, of another shape
    than the config says, or there in two spellings; no tensor is read for that.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        self._model, self._checkpoint = model, checkpoint
        self._empty: dict[str, Any] = dict(model.state_dict())  # name in the model -> meta tensor
        self._groups, unknown = tensor_groups(model, checkpoint)
        with shapes_only():
            self._check(self._groups, unknown)

    def tensors(self, names: Collection[str], *, mapped: bool = False) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor) of these tensors of the model, in the model's type.

        They are in memory of their own; with ``mapped``, what `stored` finds in a file is mapped
        from there.
        """
        with self._reader() as read:
            for group in self._groups.values():
                if group.target in names and group.stacked:
                    whole = self._in_memory(group.target)
                    for part in range(len(whole)):
                        whole[part].copy_(self._convert(group, part, read)[group.target][0])
                    yield group.target, whole
                elif group.target in names and mapped and self.stored(group.target) is not None:
                    yield group.target, self._convert(group, None, read)[group.target]
                elif group.target in names:
                    for name, tensor in self._convert(group, None, read).items():
                        yield name, self._in_memory(name).copy_(tensor)

    def _in_memory(self, name: str) -> Any:
        """Return a tensor like the model's tensor ``name``, its numbers left open."""
        empty = self._empty[name]
        return import_extra("torch").empty(empty.shape, dtype=empty.dtype)

    def mapped(self, name: str) -> Any:
        """Return a tensor of the model mapped from its file, in its type there.

        None if the file does not hold it as the model has it.
        """
        if self._source(name) is None:
            return None
        with self._reader() as read:
            return self._convert(self._groups[name], None, read)[name]

    def stored(self, name: str) -> TensorEntry | None:
        """Return where a file holds a tensor of the model to the bit; None: it has to be made."""
        source, kind = self._source(name), str(self._empty[name].dtype)
        if source is None or kind != f"torch.{FLOATS.get(source.dtype)}":
            return None
        return source

    def _source(self, name: str) -> TensorEntry | None:
        """Return the one tensor that becomes ``name`` as it is, but perhaps in another type."""
        group = self._groups.get(name)
        if group is None or group.converter is not None:
            return None
        ((source, *_),) = group.sources.values()
        checkpoint = self._checkpoint
        if isinstance(checkpoint, DecodedCheckpoint) and source in checkpoint.weights:
            return None
        return checkpoint.tensors[source]

    def _check(self, groups: Mapping[str, TensorGroup], unknown: Mapping[str, str]) -> None:
        """Raise CrispError unless the groups make exactly the model's tensors."""
        folder, targets = self._checkpoint.folder, set[str]()
        for group in groups.values():
            for target, shape in self._shapes(group).items():
                targets.add(target)
                expected = self._empty[target].shape
                if shape != expected:
                    raise CrispError(
                        f"{folder}: {group}: {target} becomes {list(shape)}; {list(expected)} was "
                        "expected from the config"
                    )
        missing = self._empty.keys() - targets - self._model.all_tied_weights_keys.keys()
        keys = SimpleNamespace(missing_keys=missing, unexpected_keys=set(unknown))
        self._model._adjust_missing_and_unexpected_keys(keys)  # each family knows exceptions
        if keys.missing_keys:
            raise CrispError(f"{folder}: lacks the model's {min(keys.missing_keys)}")
        if keys.unexpected_keys:
            raise CrispError(
                f"{folder}: holds {min(keys.unexpected_keys)}, which the model does not have"
            )

    def _shapes(self, group: TensorGroup) -> dict[str, Any]:
        """Return name and shape of each tensor that the group becomes.

        On the way ``group.stacked`` is set where the tensor can be made in parts.
        """
        torch, tensors = import_extra("torch"), self._checkpoint.tensors

        def read(name: str) -> Any:
            return torch.empty(tensors[name].shape, device="meta")

        expected = self._empty[group.target].shape
        if group.may_be_stacked(expected[0] if expected else 0, tensors):
            part = {name: x.shape for name, x in self._convert(group, 0, read).items()}
            group.stacked = part == {group.target: (1, *expected[1:])}
        if group.stacked:
            return {group.target: expected}
        return {name: x.shape for name, x in self._convert(group, None, read).items()}

    def _convert(self, group: TensorGroup, part: int | None, read: ReadTensor) -> dict[str, Any]:
        """Return the tensors that the group becomes, or entry ``part`` of a stacked one."""
        try:
            return group.convert(self._model, part, read)
        except ConversionError as error:
            raise CrispError(f"{self._checkpoint.folder}: {group}: {error}") from error

    @contextmanager
    def _reader(self) -> Iterator[ReadTensor]:
        """Provide ``read(name)``, which maps a tensor of the checkpoint from its file.

        Quantised weights are decoded, in the type of the model's tensor that they go into.
        """
        opened, decoded, decoder = dict[Path, Any](), dict[str, Any](), None
        with ExitStack() as stack:
            if isinstance(self._checkpoint, DecodedCheckpoint):
                decoder = stack.enter_context(self._checkpoint.decoder())
                decoded = {
                    name: self._empty[group.target].dtype
                    for group in self._groups.values()
                    for names in group.sources.values()
                    for name in names
                    if name in self._checkpoint.weights
                }

            def read(name: str) -> Any:
                if decoder is not None and name in decoded:
                    return decoder.read_tensor(name, decoded[name])
                path = self._checkpoint.folder / self._checkpoint.tensors[name].shard
                try:
                    if path not in opened:
                        opened[path] = stack.enter_context(safe_open(path, "pt"))
                    return opened[path].get_tensor(name)
                except (OSError, SafetensorError) as error:
                    raise CrispError(f"{path}: cannot be read: {error}") from error

            yield read
