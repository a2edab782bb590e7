"""The same results from wherever the work is done."""

from __future__ import annotations

import itertools
import os

import pytest

from crisp.errors import CrispError
from crisp.sim.parallel import side_by_side


def square(n: int) -> int:
    return n * n


def own_id(n: int) -> int:
    return os.getpid()


def test_one_job_stays_in_this_process_and_takes_items_as_it_goes() -> None:
    with side_by_side(square, itertools.count(), jobs=1) as found:
        assert list(itertools.islice(found, 4)) == [0, 1, 4, 9]
    with side_by_side(own_id, [1], jobs=1) as found:
        assert list(found) == [os.getpid()]


@pytest.mark.seconds
def test_processes_of_this_machine() -> None:
    with side_by_side(square, iter(range(20)), jobs=2) as found:
        assert sorted(found) == [n * n for n in range(20)]


def test_a_scheduler_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("crisp.sim.parallel._CONNECT", 0.5)
    with (
        pytest.raises(CrispError, match=r"^--scheduler 127\.0\.0\.1:9: no dask scheduler answers"),
        side_by_side(square, [1], jobs=0, backend="dask", scheduler="127.0.0.1:9"),
    ):
        pass


def test_a_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with (
        pytest.raises(CrispError, match=r"^--backend ray: is not installed; pip install ray$"),
        side_by_side(square, [1], jobs=0, backend="ray", scheduler="auto"),
    ):
        pass
