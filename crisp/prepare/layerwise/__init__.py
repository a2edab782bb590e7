"""Preparation of models larger than memory: one decoder layer is in memory at a time."""
