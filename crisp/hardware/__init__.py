"""Machines: their published or measured numbers, what operations cost on them, and joules."""
