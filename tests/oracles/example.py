"""Reads docs/worked-example.md: the toy and its tables."""

import json
import re
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[2] / "docs" / "worked-example.md"
# stream, event, expert (None: router), first block, blocks, start, end
Activity = tuple[str, int, int | None, int, int, int, int]


def toy(path: Path = PATH) -> dict[str, Any]:
    """The JSON block at the top of the page."""
    return json.loads(path.read_text().split("```json")[1].split("```")[0])


def tables(path: Path = PATH) -> dict[tuple[str, str, str, str], dict[str, Any]]:
    """By (order, unit, granularity, prefetch): total_ns, hits, partial, blocks_loaded; activities,
    by (start, stream); kept, for every event {expert: blocks} of its layer when it ends."""
    found = {}
    for section in path.read_text().split("\n### ")[1:]:
        title = re.match(r"(\w+), unit (\w+), granularity (\w+)(?:, prefetch (\w+))?\n", section)
        summary = re.search(r"Total (\d+) ns; (\d+) hits, (\d+) partial, (\d+) blocks", section)
        assert title and summary, section
        names = ("total_ns", "hits", "partial", "blocks_loaded")
        table: dict[str, Any] = dict(zip(names, map(int, summary.groups()), strict=True))
        activities: list[Activity] = []
        kept = []
        for line in re.findall(r"^\| \d.*\|$", section, re.MULTILINE):
            number, router, link, compute, entries = (c.strip() for c in line.strip("|").split("|"))
            event = int(number)
            start, end = router.split("-")
            activities.append(("compute", event, None, 0, 0, int(start), int(end)))
            for stream, cell in (("link", link), ("compute", compute)):
                for item in filter(None, cell.split(", ")):
                    parts = re.fullmatch(r"(\+?)(\d+)\[(\d+):(\d+)\] (\d+)-(\d+)", item)
                    assert parts, item
                    ahead = parts[1] == "+"
                    expert, first, last, start_ns, end_ns = map(int, parts.groups()[1:])
                    blocks = last - first
                    activities.append(
                        (stream, event + ahead, expert, first, blocks, start_ns, end_ns)
                    )
            pairs = (entry.split(":") for entry in entries.split())
            kept.append({int(expert): int(blocks) for expert, blocks in pairs})
        table["activities"] = sorted(activities, key=lambda a: (a[5], a[0]))
        table["kept"] = kept
        order, unit, granularity, prefetch = title.groups()
        found[order, unit, granularity, prefetch or "none"] = table
    return found
