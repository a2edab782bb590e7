"""What ``crisp doctor`` finds, and how it is told."""

from __future__ import annotations

from typing import Any, NamedTuple


class Finding(NamedTuple):
    """One thing that was looked at."""

    what: str
    ok: bool
    found: str
    remedy: str | None = None
    values: dict[str, Any] | None = None  # numbers, for programs

    def to_dict(self) -> dict[str, Any]:
        """All of it, safe for JSON."""
        told = {"what": self.what, "ok": self.ok, "found": self.found, "remedy": self.remedy}
        return told | (self.values or {})


def lines(found: list[Finding]) -> list[str]:
    """A line for each finding, and one below it for what can be done."""
    width = max(len(finding.what) for finding in found)
    told = []
    for finding in found:
        told.append(f"{'ok' if finding.ok else '--'}  {finding.what:<{width}}  {finding.found}")
        if finding.remedy is not None:
            told.append(f"{'':<{width + 6}}{finding.remedy}")
    return told
