"""Metrics: what a run is measured by, each with its name, its unit and what it is divided by."""
