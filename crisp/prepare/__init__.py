"""Offline preparation: importance of neurons, roles of experts, reordered weights (paper, 4.1)."""
