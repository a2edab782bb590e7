"""Names added to crisp's tables from outside: by files given as --plugin, and by entry points.

A table maps names to rules, classes or functions. `crisp.plugins` adds to the tables; `find_name`
looks a name up, and asks installed packages only for one that is not there.
"""

from __future__ import annotations

import hashlib
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from crisp.errors import CrispError, unknown_name

T = TypeVar("T")
R = TypeVar("R")
GROUP = "crisp.plugins"  # of entry points
_NAME = re.compile(r"[a-z_][a-z0-9_-]*")


class Origin(NamedTuple):
    """Where a name was added: the source file's name and the sha256 of its text."""

    file: str
    sha256: str


@dataclass(frozen=True)
class PluginFile:
    """A file given as --plugin, with its text: unpickling it in another process loads it there."""

    path: str  # absolute
    text: bytes

    @property
    def module(self) -> str:
        """The name of its module, the same in every process."""
        return f"crisp_plugin_{Path(self.path).stem}_{_sha256(self.text)[:12]}"

    def __reduce__(self) -> tuple[Callable[[str, bytes], PluginFile], tuple[str, bytes]]:
        """Load the file where it is unpickled."""
        return load_text, (self.path, self.text)


_files: dict[PluginFile, None] = {}  # those loaded, in order
_origins: dict[tuple[str, str], Origin] = {}  # by kind and name
_package_files: set[str] = set()  # of modules that registered names without being given


def load_file(path: Path) -> None:
    """Run a plugin file, once; CrispError, one line with file and line, if that fails."""
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
        raise CrispError(f"--plugin {path}: not a file")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CrispError(f"--plugin {path}: {error.strerror or error}") from error
    load_text(str(path.resolve()), text, str(path))


def load_text(path: str, text: bytes, given: str | None = None) -> PluginFile:
    """Run the text of a plugin file, once; given: how errors name it, if not by its path."""
    file = PluginFile(path, text)
    if file in _files:
        return file
    module = ModuleType(file.module)
    module.__file__ = path
    sys.modules[file.module] = module  # where dataclasses and pickle look for it
    _files[file] = None
    try:
        exec(compile(text, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del _files[file], sys.modules[file.module]
        raise CrispError(f"--plugin {given or path}: {_describe(error, path)}") from error
    return file


def _describe(error: BaseException, path: str) -> str:
    """Return what went wrong in a file, and in which of its lines."""
    if isinstance(error, SyntaxError):
        return error.msg if error.lineno is None else f"line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
             if frame.filename == path]  # fmt: skip
    where = f"line {lines[-1]}: " if lines else ""
    kind = "" if isinstance(error, CrispError) else f"{type(error).__name__}: "
    return f"{where}{kind}{error}".rstrip(": ")


@cache
def load_entry_points() -> None:
    """Load the entry points of installed packages, once; CrispError for one that fails.

    The target is a module, whose import registers names, or a function that does.
    """
    from importlib import metadata  # slow to import, and seldom needed

    for point in metadata.entry_points(group=GROUP):
        try:
            target = point.load()
            if callable(target):
                target()
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            raise CrispError(f"plugin {point.name} ({point.value}): {what}") from error


def add_name(
    table: MutableMapping[str, T],
    name: str,
    value: T,
    kind: str,
    source: Any,
    arguments: int | None = None,
) -> None:
    """Put a value into a table under a new name.

    kind: what it is called, such as cache; source: the function or class that was registered;
    arguments: how many the function is called with. Raises CrispError for a name that is taken or
    could not be written on a command line, and for a function that does not take the arguments.
    """
    if not _NAME.fullmatch(str(name)):  # a function, where the parentheses were forgotten
        raise CrispError(f"{kind} '{name}': expected small letters, digits, - and _")
    if name in table:
        origin = _origins.get((kind, name))
        raise CrispError(
            f"{kind} {name}: the name is taken by {origin.file if origin else 'crisp itself'}"
        )
    if not callable(source):
        raise CrispError(f"{kind} {name}: expected a function or a class, found {source!r}")
    if arguments is not None:
        check_arguments(source, arguments, f"{kind} {name}")
    origin = _origin_of(source)  # first: what fails leaves no name behind
    table[name] = value
    _origins[kind, name] = origin


def check_arguments(function: Callable[..., Any], count: int, what: str) -> None:
    """Raise CrispError for a function that cannot be called with so many arguments."""
    import inspect  # slow to import, and seldom needed

    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not written in Python, and silent about its arguments
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise CrispError(
            f"{what}: {getattr(function, '__name__', 'it')}{signature} is called with "
            f"{count} argument{'s' * (count != 1)}: {error}"
        ) from error


def _origin_of(source: Any) -> Origin:
    """Return the file that a function or class comes from."""
    module = getattr(source, "__module__", None) or "builtins"
    path = getattr(sys.modules.get(module), "__file__", None)
    for file in _files:
        if file.module == module:
            return Origin(Path(file.path).name, _sha256(file.text))
    if path is not None and Path(path).is_file():
        if module != "__main__":  # through whose frames crisp itself may be called
            _package_files.add(path)
        return Origin(Path(path).name, _sha256(Path(path).read_bytes()))
    import inspect  # slow to import, and seldom needed

    try:
        text = inspect.getsource(source).encode()  # a notebook's
    except (OSError, TypeError):  # of standard input, or not written in Python
        code = getattr(source, "__code__", None)
        name = getattr(source, "__qualname__", type(source).__name__)
        text = name.encode() if code is None else code.co_code
    return Origin(module, _sha256(text))


def check_named(name: object, kind: str) -> None:
    """Raise CrispError for a decorator that was used without a name in parentheses."""
    if not isinstance(name, str):
        raise CrispError(f'register_{kind}: expected a name, as in @register_{kind}("mine")')


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def find_name(table: Mapping[str, T], name: str, kind: str) -> T:
    """Return what a name stands for in a table; CrispError with the nearest one if it is unknown.

    Entry points are loaded for a name that is not there.
    """
    if name not in table:
        load_entry_points()
        if name not in table:
            raise unknown_name(name, table, kind)
    return table[name]


def origin_of(kind: str, name: str) -> Origin | None:
    """Return where a name was added; None for one of crisp's own."""
    return _origins.get((kind, name))


def describe_origins(names: Iterable[tuple[str, str]]) -> str:
    """Return where (kind, name)s were added, as it is noted in a run; empty if nowhere.

    >>> describe_origins([("cache", "lru")])
    ''
    """
    origins = (_origins.get(one) for one in names)
    found = {f"{origin.file} sha256:{origin.sha256}" for origin in origins if origin is not None}
    return "; ".join(sorted(found))


def with_plugins(function: Callable[[T], R]) -> Callable[[T], R]:
    """Return a function that loads this process's plugin files wherever it is unpickled."""
    return partial(_call, tuple(_files), function) if _files else function


def _call(files: tuple[PluginFile, ...], function: Callable[[T], R], item: T) -> R:
    """Call the function: unpickling ``files``, which stand before it, has loaded them."""
    try:
        return function(item)
    except (Exception, SystemExit) as error:
        fault = plugin_fault(error)
        if fault is None:
            raise
        raise fault from error


def plugin_fault(error: BaseException) -> CrispError | None:
    """Return one line about an error that was raised in a plugin file; None: it was not."""
    if isinstance(error, CrispError):
        return None
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in _package_files:
            return CrispError(f"plugin {frame.filename}: {_describe(error, frame.filename)}")
        for file in _files:
            if frame.filename == file.path:
                return CrispError(f"--plugin {file.path}: {_describe(error, file.path)}")
    return None
