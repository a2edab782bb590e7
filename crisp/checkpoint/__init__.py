"""Checkpoints on disk, and models loaded from them whole or one layer at a time."""
