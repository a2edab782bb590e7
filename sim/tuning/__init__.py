"""Thresholds chosen by measured loss of quality and simulated cost."""
