"""CRISP: widths, schedules and caches for Mixture-of-Experts inference on edge devices."""

__version__ = "0.1.0"
TOOL = f"crisp-moe {__version__}"  # as it signs the files it writes
