"""Build hook: the package's long description is README.md with absolute links.

A package index shows README.md outside the repository, where relative links lead nowhere. They are
completed with ``project.urls.Repository`` of pyproject.toml, the one place that names it. While
that is not set, links become plain text and images are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def long_description(readme: str, repository: str | None) -> str:
    """Return the text of a README with its relative links completed, or without them."""

    def complete(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        if repository is None:
            return "" if image else text
        return f"{image}[{text}]({repository}/{'raw' if image else 'blob'}/HEAD/{target})"

    return RELATIVE_LINK.sub(complete, readme)


class LongDescriptionHook(MetadataHookInterface):
    """The hook that hatchling runs before it writes any metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``readme``."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = long_description(readme, metadata["urls"].get("Repository"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
