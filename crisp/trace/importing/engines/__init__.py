"""Logs of other engines: what each wrote of its routing, read into one form."""

from crisp.trace.importing.engines.log import EngineLog, ExpertCounts
from crisp.trace.importing.engines.registry import (
    ENGINES,
    not_recognised,
    read_log,
    recognise_log,
)

__all__ = ["ENGINES", "EngineLog", "ExpertCounts", "not_recognised", "read_log", "recognise_log"]
