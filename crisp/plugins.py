"""Decorators by which plugins add widths, caches, orders, prefetchers and more.

A plugin is a file named with ``--plugin``, or an installed package's entry point in the group
``crisp.plugins``. What it registers stands in the same tables as crisp's own names and works by its
name wherever those do; docs/extending.md says what each function is given and may do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy.typing as npt

from crisp.adapter.layout import LAYOUTS, FindExperts
from crisp.errors import CrispError
from crisp.extensions import add_name, check_arguments, check_named
from crisp.policy.cache import CACHES, CacheRule
from crisp.policy.eviction import AdmittedRule, UsedRule, VictimRule
from crisp.policy.order import ORDERS, Key, OrderRule
from crisp.policy.prefetch import FUTURE, PREFETCHERS, PROFILE, ROUTER, Predict, PrefetchRule
from crisp.policy.widths.base import CheckedWidths, WidthPolicy, table_of, weights_of
from crisp.policy.widths.names import WIDTHS

if TYPE_CHECKING:
    from crisp.hw.devices.options import OpenDevice

__all__ = [
    "WidthPolicy",
    "register_cache",
    "register_device",
    "register_importer",
    "register_layout",
    "register_order",
    "register_prefetcher",
    "register_width",
    "table_of",
    "weights_of",
]

W = TypeVar("W", bound=WidthPolicy)
F = TypeVar("F", bound=Callable[..., Any])
_ARRAYS = ("last", "count", "mark", "stamp")


def register_width(name: str) -> Callable[[type[W]], type[W]]:
    """Register a frozen dataclass as width ``name``; it inherits `WidthPolicy`."""

    check_named(name, "width")

    def register(kind: type[W]) -> type[W]:
        bases: tuple[type, ...] = getattr(kind, "__mro__", ())
        if WidthPolicy not in bases or "__dataclass_fields__" not in vars(kind):
            raise CrispError(f"width {name}: expected a frozen dataclass that inherits WidthPolicy")
        if kind in WIDTHS.values():
            raise CrispError(f"width {name}: {kind.__name__} has a name already")
        if getattr(kind, "__abstractmethods__", None):
            raise CrispError(f"width {name}: {kind.__name__} has no method bind")
        bind = kind.bind

        def checked(self: W, spec: Any, profile: Any, ordered: bool) -> CheckedWidths:
            return CheckedWidths(name, bind(self, spec, profile, ordered), spec)

        kind.bind = checked  # type: ignore[method-assign, assignment]
        build: Callable[..., WidthPolicy] = kind
        add_name(WIDTHS, name, build, "width", kind)
        return kind

    return register


def register_cache(
    name: str,
    *,
    last: str = "last",
    count: str = "count",
    used: UsedRule | None = None,
    admitted: AdmittedRule | None = None,
    drawn: bool = False,
    by_pass: bool = False,
    suffixes: bool = False,
    preloaded: bool = False,
    tiered: bool = False,
) -> Callable[[VictimRule], VictimRule]:
    """Register a victim function as cache ``name``; the options are those of `CacheRule`."""
    check_named(name, "cache")
    for array in (last, count):
        if array not in _ARRAYS:
            raise CrispError(f"cache {name}: array '{array}', expected {', '.join(_ARRAYS)}")

    def register(victim: VictimRule) -> VictimRule:
        rule = CacheRule(
            victim, last, count, used, admitted, drawn, by_pass, suffixes, preloaded, tiered
        )
        for noted, arguments in ((used, 8), (admitted, 5)):
            if noted is not None:
                check_arguments(noted, arguments, f"cache {name}")
        add_name(CACHES, name, rule, "cache", victim, 6)
        return victim

    return register


def register_order(
    name: str, *, timed: bool = False, drawn: bool = False
) -> Callable[[Callable[[int, int, int, int], Key]], Callable[[int, int, int, int], Key]]:
    """Register a key function as order ``name``; the options are those of `OrderRule`."""

    check_named(name, "order")

    def register(
        key: Callable[[int, int, int, int], Key],
    ) -> Callable[[int, int, int, int], Key]:
        add_name(ORDERS, name, OrderRule(key, timed, drawn), "order", key, 4)
        return key

    return register


def register_prefetcher(name: str, *, source: str = "") -> Callable[[Predict], Predict]:
    """Register a function as prefetcher ``name``; source: ``router``, ``profile``, ``future``."""
    check_named(name, "prefetcher")
    if source not in ("", ROUTER, PROFILE, FUTURE):
        raise CrispError(f"prefetch {name}: source '{source}', expected router, profile or future")

    def register(predict: Predict) -> Predict:
        add_name(PREFETCHERS, name, PrefetchRule(predict, source), "prefetch", predict, 2)
        return predict

    return register


Columns = Callable[[Path], Mapping[str, npt.ArrayLike]]


def register_importer(name: str) -> Callable[[Columns], Columns]:
    """Register a function from a path to the columns of a long table, for `crisp trace import`."""
    check_named(name, "importer")
    from crisp.trace.importing.readers import READERS, LongTable, table_of_columns  # with pyarrow

    def register(read: Columns) -> Columns:
        def open_table(path: Path) -> LongTable:
            return table_of_columns(path, read(path))

        add_name(READERS, name, open_table, "importer", read, 1)
        return read

    return register


def register_device(
    name: str, *, torch: str = "cpu", options: tuple[str, ...] = ()
) -> Callable[[OpenDevice], OpenDevice]:
    """Register a function that opens a `Device` as device ``name``.

    torch: where the rest of a model runs, as torch calls it; options: those of ``--threads``,
    ``--link-limit``, ``--verify``, ``--host-limit`` and ``--loads-from`` that it takes, by name.
    """
    check_named(name, "device")
    from crisp.hw.devices.options import DEVICES, DeviceKind  # imports what devices need

    def register(open_device: OpenDevice) -> OpenDevice:
        add_name(DEVICES, name, DeviceKind(open_device, torch, options), "device", open_device, 3)
        return open_device

    return register


def register_layout(name: str) -> Callable[[FindExperts], FindExperts]:
    """Register a function that finds the routed experts of models that crisp does not know."""

    check_named(name, "layout")

    def register(find: FindExperts) -> FindExperts:
        add_name(LAYOUTS, name, find, "layout", find, 2)
        return find

    return register
