"""The simulator: link and compute as streams, and the hardware profiles that they run on.

The names below are the public interface; `simulate` and `fast_simulate` give the same figures.
"""

from crisp.sim.experiment import PlannedRun, plan_run, run_all, run_case
from crisp.sim.fast_simulate import fast_simulate
from crisp.sim.hardware import hardware_profile, hardware_profile_names
from crisp.sim.simulate import simulate

__all__ = [
    "PlannedRun",
    "fast_simulate",
    "hardware_profile",
    "hardware_profile_names",
    "plan_run",
    "run_all",
    "run_case",
    "simulate",
]
