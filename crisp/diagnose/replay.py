"""The replay of one cache rule on a run's layer calls, in a budget of bytes.

Event by event: a call looks its entries up in order; what is missing is read and admitted. Either
each miss first evicts until it fits (``at_once``), or the call ends and then as much is evicted as
is over the budget. Where the rule ``protects``, nothing that the call uses is evicted: what does
not fit beside it is read and, at once, not kept, or else kept over the budget until a later call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from crisp.diagnose.calls import Calls
from crisp.diagnose.contracts import HEAT_USES, HOT_TOKENS, EnginePolicy

NEVER = 1 << 62
_STALE = 8  # items that a heap may have for each resident entry, before the stale ones are removed
Key = tuple[int, int]  # the least goes first: what the rule says, then the last use


@dataclass(frozen=True, eq=False)
class Replayed:
    """What a cache did: which lookups it had, and what they cost."""

    hit: npt.NDArray[np.bool_]  # [lookups], in the order of the calls
    calls: Calls

    def per_call(self) -> npt.NDArray[np.int64]:
        """Return (lookups, hits) of each call: [calls, 2]."""
        starts = self.calls.starts()
        hits = np.concatenate([[0], np.cumsum(self.hit, dtype=np.int64)])
        counts: npt.NDArray[np.int64] = np.stack([np.diff(starts), np.diff(hits[starts])], axis=1)
        return counts

    def hit_rate(self, *, decode: bool = False) -> float:
        """Return the share of lookups that were hits, of decoded tokens alone or of all."""
        counts = self.per_call()
        if decode:
            counts = counts[self.calls.token >= 0]
        lookups, hits = counts.sum(axis=0)
        return float(hits / lookups) if lookups else 0.0

    def read_bytes(self, aligned: int = 0) -> npt.NDArray[np.int64]:
        """Return the bytes that each call reads [calls]; aligned: more for each miss."""
        lookups, hits = self.per_call().T
        size = np.array(self.calls.size, np.int64)[self.calls.row] + aligned
        n_bytes: npt.NDArray[np.int64] = (lookups - hits) * size
        return n_bytes

    def cumulative(self) -> npt.NDArray[np.float64]:
        """Return the hit rate from the beginning to the end of each decoded token [tokens]."""
        lookups, hits = np.cumsum(self.per_call(), axis=0).T
        ends = np.flatnonzero(np.diff(self.calls.token, append=-2) != 0)
        ends = ends[self.calls.token[ends] >= 0]
        rates: npt.NDArray[np.float64] = hits[ends] / lookups[ends]
        return rates


def replay(calls: Calls, policy: EnginePolicy, budget: int) -> Replayed:
    """Replay a rule in a budget of bytes, from an empty cache."""
    cache = _Cache(calls, policy, budget)
    hit = bytearray()
    token = 0
    for number, entries in enumerate(calls.entries):
        if calls.token[number] > token:
            token = int(calls.token[number])
            cache.next_token(token)
        hit += cache.call(number, entries)
    return Replayed(np.frombuffer(bytes(hit), np.bool_), calls)


class _Cache:
    """The entries that are resident, and which goes first."""

    def __init__(self, calls: Calls, policy: EnginePolicy, budget: int) -> None:
        self._calls, self._policy = calls, policy
        parts = len(calls.size) if policy.scope == "layer" else 1
        self._room = budget // parts
        self._used = [0] * parts
        self._waiting: list[list[tuple[Key, int]]] = [[] for _ in range(parts)]  # heaps
        self._key: dict[int, Key] = {}  # of what is resident: what else lies in a heap is stale
        self._uses: dict[int, int] = {}
        self._clock = 0
        self._following = _following(calls) if policy.rule == "furthest" else []
        self._next: dict[int, int] = {}

    def call(self, number: int, entries: Sequence[int]) -> bytearray:
        """Look the entries of a call up; return a flag for each, 1 for a hit."""
        policy, calls = self._policy, self._calls
        row = int(calls.row[number])
        part, size = (row if policy.scope == "layer" else 0), calls.size[row]
        last_used = calls.last_used[number]
        used_now = frozenset(last_used if policy.protects else ())
        if policy.rule == "furthest":
            self._next.update(zip(last_used, self._following[number], strict=True))
        flags = bytearray()
        for entry in entries:
            hit = entry in self._key
            flags.append(hit)
            self._clock += 1
            anew = policy.rule == "heat" and not hit  # a stay begins
            self._uses[entry] = 0 if anew else self._uses.get(entry, 0) + 1
            if not hit:
                if policy.at_once and not self._make_room(part, size, used_now):
                    continue  # read for this call, and not kept
                self._used[part] += size
            self._touch(part, entry)
        if len(entries) == len(last_used) and entries != last_used:
            for entry in last_used:  # what a prompt asks for repeatedly was last used there
                if entry in self._key:
                    self._clock += 1
                    self._touch(part, entry)
        if not policy.at_once:
            self._make_room(part, 0, used_now)
        return flags

    def next_token(self, token: int) -> None:
        """Begin a decoded token: counts that fade are halved."""
        if self._policy.rule != "hot" or token % HOT_TOKENS:
            return
        self._uses = {entry: uses >> 1 for entry, uses in self._uses.items()}
        for heap in self._waiting:
            fresh = [item for item in heap if self._key.get(item[1]) == item[0]]
            heap[:] = [((self._uses[entry], last), entry) for (_, last), entry in fresh]
            heapify(heap)
            self._key |= {entry: key for key, entry in heap}

    def _rank(self, entry: int) -> int:
        """Return what the rule says of an entry, before its last use decides."""
        rule = self._policy.rule
        if rule == "lru":
            return 0
        if rule == "furthest":
            return -self._next[entry]
        return self._uses[entry] > HEAT_USES if rule == "heat" else self._uses[entry]

    def _touch(self, part: int, entry: int) -> None:
        """Note a use: the entry is resident, and has a new place in the order."""
        self._key[entry] = key = (self._rank(entry), self._clock)
        heap = self._waiting[part]
        heappush(heap, (key, entry))
        if len(heap) > _STALE * (len(self._key) + 1):
            heap[:] = [item for item in heap if self._key.get(item[1]) == item[0]]
            heapify(heap)

    def _make_room(self, part: int, size: int, used_now: Collection[int]) -> bool:
        """Evict until ``size`` more bytes fit; return whether they do."""
        heap, kept = self._waiting[part], []
        while self._used[part] + size > self._room:
            victim = -1
            while victim < 0 and heap:
                key, entry = heappop(heap)
                if self._key.get(entry) != key:
                    continue
                if entry in used_now:
                    kept.append((key, entry))
                else:
                    victim = entry
            if victim < 0:
                break
            del self._key[victim]
            self._used[part] -= self._calls.size[victim // self._calls.entries_per_layer]
        for item in kept:
            heappush(heap, item)
        return self._used[part] + size <= self._room


def _following(calls: Calls) -> list[list[int]]:
    """Return the next call that uses each entry of each call, by its last appearance."""
    soon: dict[int, int] = {}
    following: list[list[int]] = []
    for number in range(len(calls.last_used) - 1, -1, -1):
        following.append([soon.get(entry, NEVER) for entry in calls.last_used[number]])
        soon.update(dict.fromkeys(calls.last_used[number], number))
    return following[::-1]
