"""CRISP: widths, schedules and caches for Mixture-of-Experts inference on edge devices.

The names below are the public interface, each imported when it is first used. `crisp.sim` simulates
what they describe; `crisp.hw` runs it on real hardware.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from crisp.version import __version__ as __version__

if TYPE_CHECKING:
    from crisp.errors import CrispError as CrispError
    from crisp.hardware.profile import HardwareProfile as HardwareProfile
    from crisp.model.spec import ModelSpec as ModelSpec
    from crisp.policy import Budget as Budget
    from crisp.policy import Policy as Policy
    from crisp.profile import Profile as Profile
    from crisp.run.case import Case as Case
    from crisp.run.case import Conditions as Conditions
    from crisp.run.compare import compare as compare
    from crisp.run.inputs import LoadedInputs as LoadedInputs
    from crisp.run.inputs import TraceSource as TraceSource
    from crisp.run.inputs import load_inputs as load_inputs
    from crisp.run.repeats import StoppingRule as StoppingRule
    from crisp.run.result import Run as Run
    from crisp.run.result import load_runs as load_runs
    from crisp.run.result import save_runs as save_runs
    from crisp.run.setup import Setup as Setup
    from crisp.run.setup import load_setup as load_setup
    from crisp.trace import RoutingTrace as RoutingTrace

_MODULES = {
    "Budget": "crisp.policy",
    "Case": "crisp.run.case",
    "Conditions": "crisp.run.case",
    "CrispError": "crisp.errors",
    "HardwareProfile": "crisp.hardware.profile",
    "LoadedInputs": "crisp.run.inputs",
    "ModelSpec": "crisp.model.spec",
    "Policy": "crisp.policy",
    "Profile": "crisp.profile",
    "RoutingTrace": "crisp.trace",
    "Run": "crisp.run.result",
    "Setup": "crisp.run.setup",
    "StoppingRule": "crisp.run.repeats",
    "TraceSource": "crisp.run.inputs",
    "compare": "crisp.run.compare",
    "load_inputs": "crisp.run.inputs",
    "load_runs": "crisp.run.result",
    "load_setup": "crisp.run.setup",
    "save_runs": "crisp.run.result",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
