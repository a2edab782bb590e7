"""Import torch and transformers without what only compiles, distributes or trains a model.

transformers imports more than it needs to run a model: torch's compiler for a few decorators,
tensors that lie on several machines (and sympy for both), and scipy and accelerate where they are
installed. `lean_imports` keeps all of that out of memory; docs/memory.md has what each part takes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"
_VMAP = "torch._dynamo._trace_wrapped_higher_order_op"
# What transformers asks before it imports a package: the answer is no.
_QUESTIONS = "is_torch_distributed_available", "is_scipy_available", "is_accelerate_available"


def lean_imports() -> None:
    """Let what is imported from now on leave out what only compiling and distributing needs.

    For a process that does nothing else: transformers can neither distribute a model in it nor use
    accelerate. Modules that have been imported already stay. Without torch or transformers, nothing
    happens.
    """
    try:
        utils = importlib.import_module("transformers.utils")
        importlib.import_module("torch")
    except ImportError:  # what needs them says so
        return
    for module in (utils, utils.import_utils):
        for question in _QUESTIONS:
            setattr(module, question, _no)
    for name, answers in _ANSWERS.items():
        if name not in sys.modules:
            sys.modules[name] = StandIn(name, answers)


class StandIn(ModuleType):
    """A module that has a few of another one's names; asked for any other, it gives way to it."""

    def __init__(self, name: str, answers: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(answers)

    def __getattr__(self, name: str) -> Any:
        # the import system asks a package for its path when it imports what lies in it
        if name.startswith("__") and (name, self.__name__) != ("__path__", _DYNAMO):
            raise AttributeError(name)
        return getattr(real_module(self.__name__), name)


def real_module(name: str) -> Any:
    """Import a module itself; from then on there are no stand-ins."""
    for other in _ANSWERS:
        if isinstance(sys.modules.get(other), StandIn):
            del sys.modules[other]
    return importlib.import_module(name)


def _no(*_: Any, **__: Any) -> bool:
    return False


def _undecorated(function: Any = None, *_: Any, **__: Any) -> Any:
    """Return the function: where nothing is compiled, it does not matter how that would be."""
    return _undecorated if function is None else function


def _transform() -> Any:
    """Return what lets torch.vmap index with numbers; a few masks of attention need it."""
    return real_module(_VMAP).TransformGetItemToIndex()


_ANSWERS: dict[str, dict[str, Any]] = {
    _DYNAMO: dict.fromkeys(("disable", "allow_in_graph", "assume_constant_result"), _undecorated),
    _VMAP: {"TransformGetItemToIndex": _transform},
}
"""The names that stand-ins have, by module."""
