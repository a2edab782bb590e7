"""Calibration: a device's times, measured as a hardware profile."""
