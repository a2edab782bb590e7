"""The names of engines, which stand apart from their readers."""

from crisp.trace.importing.engine_names import ENGINE_NAMES
from crisp.trace.importing.engines import ENGINES


def test_names_are_those_of_the_readers_in_their_order() -> None:
    assert tuple(ENGINES) == ENGINE_NAMES
