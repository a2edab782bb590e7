"""What ``crisp doctor`` finds, and how it is told."""

from __future__ import annotations

from typing import Any, NamedTuple


class Diagnosis(NamedTuple):
    """One thing that was looked at, and what can be done about it."""

    what: str
    ok: bool
    found: str
    remedy: str | None = None
    values: dict[str, Any] | None = None  # numbers, for programs

    def to_dict(self) -> dict[str, Any]:
        """Return all of it, safe for JSON."""
        fields = {"what": self.what, "ok": self.ok, "found": self.found, "remedy": self.remedy}
        return fields | (self.values or {})


def format_diagnoses(diagnoses: list[Diagnosis]) -> list[str]:
    """Return a line for each diagnosis, and one below it for what can be done."""
    width = max(len(diagnosis.what) for diagnosis in diagnoses)
    lines = []
    for diagnosis in diagnoses:
        mark = "ok" if diagnosis.ok else "--"
        lines.append(f"{mark}  {diagnosis.what:<{width}}  {diagnosis.found}")
        if diagnosis.remedy is not None:
            lines.append(f"{'':<{width + 6}}{diagnosis.remedy}")
    return lines
