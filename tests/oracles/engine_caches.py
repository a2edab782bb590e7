"""Caches of other engines, written down straight: lists, and the least of a list. Slow and plain.

A call is (layer, expert ids as routed, duplicates and all, whether it is a decoded token's).
"""

from __future__ import annotations

from collections.abc import Sequence

Call = tuple[int, Sequence[int], bool]


def straight_hits(
    calls: Sequence[Call],
    rule: str,
    budget: int,
    sizes: Sequence[int],
    *,
    per_layer: bool = False,
    at_once: bool = False,
    protects: bool = True,
    each_row: bool = False,
) -> list[list[bool]]:
    """Return, for every call, whether each of its lookups was a hit. sizes [layers]."""
    held: list[tuple[int, int]] = []  # resident, in no order
    last: dict[tuple[int, int], int] = {}
    uses: dict[tuple[int, int], int] = {}
    stay: dict[tuple[int, int], int] = {}  # hits since it came
    clock = decoded = 0
    first_layer = min(layer for layer, _, _ in calls)
    answers = []

    def next_call(entry: tuple[int, int], now: int) -> float:
        for number in range(now + 1, len(calls)):
            if calls[number][0] == entry[0] and entry[1] in calls[number][1]:
                return number
        return float("inf")

    def badness(entry: tuple[int, int], now: int) -> tuple[float, ...]:
        if rule == "lru":
            return (last[entry],)
        if rule in ("lfu", "hot"):
            return uses[entry], last[entry]
        if rule == "heat":
            return stay[entry] > 4, last[entry]
        if rule == "lfru":
            return uses[entry] * 256 + max(0, 255 - (clock - last[entry])), last[entry]
        assert rule == "furthest"
        return -next_call(entry, now), last[entry]

    def make_room(layer: int, more: int, now: int, safe: set[tuple[int, int]]) -> bool:
        room = budget // len(sizes) if per_layer else budget
        while True:
            ours = [entry for entry in held if not per_layer or entry[0] == layer]
            if sum(sizes[entry[0]] for entry in ours) + more <= room:
                return True
            may_go = [entry for entry in ours if entry not in safe]
            if not may_go:
                return False
            held.remove(min(may_go, key=lambda entry: badness(entry, now)))

    for number, (layer, ids, decode) in enumerate(calls):
        if decode and layer == first_layer:
            if rule == "hot" and decoded and decoded % 16 == 0:
                uses = {entry: count // 2 for entry, count in uses.items()}
            decoded += 1
        safe = {(layer, expert) for expert in ids} if protects else set()
        asked: list[int] = []
        hits = []
        for expert in ids:
            if not each_row and expert in asked:
                continue
            asked.append(expert)
            entry = (layer, expert)
            hit = entry in held
            hits.append(hit)
            clock += 1
            uses[entry] = uses.get(entry, 0) + 1
            stay[entry] = stay.get(entry, 0) + 1 if hit else 0
            if not hit:
                if at_once and not make_room(layer, sizes[layer], number, safe):
                    continue
                held.append(entry)
            last[entry] = clock
        if not each_row and len(asked) < len(ids):
            for place, expert in enumerate(ids):
                if (layer, expert) in held and expert not in ids[place + 1 :]:
                    clock += 1
                    last[layer, expert] = clock
        if not at_once:
            make_room(layer, 0, number, safe)
        answers.append(hits)
    return answers
