"""Checkpoints on disk and models loaded from them."""
