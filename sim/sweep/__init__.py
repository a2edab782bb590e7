"""Sweeps: many settings of a simulation, asked for in one file, run side by side."""
