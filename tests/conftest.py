"""Options and fixtures of all tests."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

# The models of the tests are tiny: more threads cost more than they save. Before torch is imported,
# and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell lets what it starts in the background ignore Ctrl-C, and so would what tests start.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

# The same examples on every machine and in every run: a red test stays red until it is mended.
settings.register_profile("reproducible", derandomize=True, deadline=None)
settings.load_profile("reproducible")


def pytest_addoption(parser: pytest.Parser) -> None:
    # To be written --data=DIR where no test is named: pytest looks for this file before it knows
    # the option, and would take the DIR of "--data DIR" for a folder of tests.
    parser.addoption("--data", metavar="DIR", help="the folder of large test inputs")
    parser.addoption("--quick", action="store_true", help="what make check runs")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--data")
    if name is not None and not (config.invocation_params.dir / name).is_dir():
        raise pytest.UsageError(f"--data={name}: no such folder")


# What takes seconds to begin with: torch, compiled code, other processes. A file of tests that
# names one of them is none of the quick ones, and is not even imported with them.
BEGINS_SLOWLY = re.compile(r"\b(torch|numba|triton|subprocess|distributed|browser)\b")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--quick") or not collection_path.name.startswith("test_"):
        return None
    return bool(BEGINS_SLOWLY.search(collection_path.read_text(encoding="utf-8"))) or None


# The longest files first: with several processes, none is left to one of them at the end.
LONGEST = (
    "test_layerwise.py",
    "test_soak.py",
    "test_packaging.py",
    "test_real_traces.py",
    "test_sweep.py",
    "test_readme.py",
    "test_quality_page.py",
    "test_sweeps_page.py",
    "test_preparation_page.py",
    "test_notebooks.py",
    "test_pipeline.py",
    "test_device.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    if config.getoption("--quick"):
        long = [i for i in items if i.get_closest_marker("slow") or i.get_closest_marker("seconds")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take temporary files for files on a disk, wherever TMPDIR is."""
    monkeypatch.setattr("crisp.hw.store.file_system.IN_MEMORY", ())


@pytest.fixture(scope="session")
def shared(pytestconfig: pytest.Config) -> Path:
    """The folder of large test inputs; tests that need it are skipped when it is not named."""
    name = pytestconfig.getoption("--data")
    if name is None:
        pytest.skip("needs --data=DIR")
    return (pytestconfig.invocation_params.dir / name).resolve()
