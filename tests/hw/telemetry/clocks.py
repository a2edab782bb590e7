"""Time that passes when a test says so."""

from __future__ import annotations


class Clock:
    """In ns; still unless ``passes``, or told to move on by ``step`` at every look."""

    def __init__(self, step: int = 0) -> None:
        self.now, self.step = 0, step

    def __call__(self) -> int:
        self.now += self.step
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)
