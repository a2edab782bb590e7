"""Calibration: measure a device's times, as a hardware profile."""
