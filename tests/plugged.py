"""Plugins in tests: what they register is gone when the test is over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from crisp import extensions
from crisp.adapter.layout import LAYOUTS
from crisp.hw.devices.options import DEVICES
from crisp.policy.cache import CACHES
from crisp.policy.order import ORDERS
from crisp.policy.prefetch import PREFETCHERS
from crisp.policy.widths.names import WIDTHS
from crisp.trace.importing.readers import READERS

TABLES: tuple[dict[str, object], ...] = (
    CACHES, DEVICES, LAYOUTS, ORDERS, PREFETCHERS, READERS, WIDTHS,
    extensions._files, extensions._origins,
)  # type: ignore[assignment]  # fmt: skip


@contextmanager
def plugged() -> Iterator[None]:
    """Restore every table, and forget the plugins, on leaving."""
    before = [dict(table) for table in TABLES]
    extensions.load_entry_points.cache_clear()
    try:
        yield
    finally:
        for table, content in zip(TABLES, before, strict=True):
            table.clear()
            table.update(content)
        for name in [name for name in sys.modules if name.startswith("crisp_plugin_")]:
            del sys.modules[name]
        extensions.load_entry_points.cache_clear()
