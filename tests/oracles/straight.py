"""The execution contract once more, in a straight line: an oracle for the simulator.

It imports nothing of crisp, sim or hw and shares no code with them. It is slow on purpose: lists,
dicts, and one loop that steps from completion to completion. The rules, in the order of the code:

Steps. Decode: `batch` slots, filled with the sequences in order; a step takes the next row of
    every occupied slot, in slot order; the slot of a finished sequence takes the next one.
    Prefill: a step is up to `chunk` successive prefill rows of one sequence. A prompt that waits
    goes before decoding; of several, the one of the sequence that was admitted first.
Layers. Every layer of a step first takes its layer time on the compute stream. If the layer is MoE
    (some row of the trace has an expert there), its event starts the instant that time ends.
Tasks. The distinct experts that some row asks for with a width > 0, in first appearance (row, then
    rank). A task is loaded at the widest width asked for; every row computes at its own.
Accesses. One a task: hit = all asked blocks are there when the event starts, partial = some.
    Last use and count (events taken part in, ever) of all tasks are updated at the event's start.
Capacity. unit=expert: floor(share * experts) * n_blocks; unit=block: floor(share * blocks). Scope
    layer splits the units evenly, the remainder one each to the first MoE layers.
Ranking. Each event ranks its tasks once, for the link and for the compute stream. fifo and
    sequential: first appearance; widest: width, descending; narrowest: ascending; resident-first:
    what has no block to load, then the others; johnson: loads shorter than their
    computation first, by load, then the others by computation, descending. Ties: appearance.
Loads. One request at a time: all missing blocks of a task (granularity expert) or one of them
    (block). Placement is decided once, at a task's first request, for all its missing blocks: kept
    in the budget or transient. unit=expert: all kept if free and unprotected blocks suffice
    (victims leave whole), else all transient and nothing is evicted. unit=block: as much as free
    and unprotected blocks allow is kept (victims give up blocks from their end, just as many as
    needed), the rest is transient. Caches none and static admit nothing. If the transient blocks
    do not fit in the staging buffer (2 * n_blocks), the link waits and nothing is evicted.
Victims. The smallest, ties by (layer, expert): lru: last use; lfu: count, last use; lfu-in-cache:
    events of this stay, last use; lfru: events of this stay over age, last use, where age is the
    events from the last use until the latest use in the pool (none: infinitely frequent); fifo: the
    event in which the first block was taken; random: the lot that `lots(event, key)` draws;
    tier-aware: warmth, last use; least-stale: whether used in this pass through the layers, layer,
    last use; suffix-lru and suffix-lfu: most blocks, then as lru or lfu, one block at a time. slru:
    protected entries last, then the oldest stamp. A new entry is not protected; one that an event
    finds is, stamped now; while more than half of the room (floored) is protected, the protected
    entry with the oldest stamp is not any more, and stamped now. A stay counts the event that
    brings an entry if it asked for it.
    Protected: the experts of the running event; predicted ones until their event starts.
Saliency. This cache has no victims: an event's start decides what stays. Every expert of the layer
    forgets a tenth of its recent weight (floored), and those that rows route to, at width 0 too,
    gain a tenth of their mean weight over the event's rows (both floored). Then each expert of the
    pool is to keep its blocks there, a task's at least its width; while that is more than the room,
    the last block of least (3 expected + 7 recent) x size goes. Of blocks that are there and asked
    for n_blocks go at most. A task with blocks in the prefetch staging keeps what is in the budget.
    What goes is out of the budget at once; blocks that a task asks for count in the staging buffer
    until computed. A load keeps what is to be kept. A prefetch takes free blocks alone.
Computations. One at a time. Granularity expert: one a task, when its whole width is there; block:
    all blocks of a task at once that are there and not yet computed, of the earliest task that has
    any. A transient block is free again when the computation that took it has ended.
Sequential. A task is loaded, then computed, then the next one; nothing overlaps.
Prefetch. When an event starts, the tasks of the next MoE layer's event are predicted (last layer:
    of the first MoE layer of the next step). previous: the tasks of that layer's last event.
    perfect: the tasks it will have. guess: the trace's guesses of this step's rows; none across
    steps. When the running event has no load left to issue, or between events, the link takes one
    block at a time: the next missing block of the first predicted expert that is not full. It goes
    into the budget if a block is free or can be freed, else (also if this expert has blocks in the
    prefetch staging, or the cache admits nothing) into the prefetch staging (n_blocks); if that is
    full, the link waits. When the event starts: staged blocks count as there; asked ones are
    transient (freed when computed), and so is what the task still has to load; others are freed at
    once. A block in flight is not there yet; if asked, the task loads only what follows it; if not,
    a staged one is dropped when it lands and a kept one stays.
    saliency(previous), saliency(guess), saliency(perfect): experts with a weight each. previous,
    perfect: all that the event's rows are routed to, at width 0 too, and the largest weight a row
    gives; guess: the largest weight of a rank at which a row guesses the expert. Instead of the
    first expert's, the link takes the next missing block of largest weight x relative size, ties
    the lowest expert, and none below 2^48.
Page cache. If the disk is read through one, it holds the last blocks that were read, by bytes. A
    request, when it is put on the link, goes through its blocks: one that is there becomes the most
    recent; another one does as well, and the least recent go; one that is larger than all never
    stays. It takes one request for the bytes that were not there and one for those that were.
Time. At one instant: all completions, then starts of layers and events, then the choices.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from tests.oracles.offline import capacities

Key = tuple[int, int]  # (layer, expert)
KEYS = (
    "lru", "lfu", "lfu-in-cache", "fifo", "slru", "lfru", "least-stale", "random", "tier-aware",
    "suffix-lru", "suffix-lfu",
)  # fmt: skip


# ---------------------------------------------------------------------------- steps


def steps(
    sequence: np.ndarray, phase: np.ndarray | None, batch: int = 1, chunk: int = 512
) -> list[list[int]]:
    """The rows of every step. `phase`: 0 prefill, 1 decode (None: all decode)."""
    waiting: list[list[int]] = []  # rows of each sequence, in the order of the trace
    for row, name in enumerate(np.asarray(sequence).tolist()):
        if row == 0 or name != sequence[row - 1]:
            waiting.append([])
        waiting[-1].append(row)
    is_prefill = [False] * len(sequence) if phase is None else (np.asarray(phase) == 0).tolist()
    slots: list[list[int]] = [[] for _ in range(batch)]
    result = []
    while True:
        for index in range(batch):
            if not slots[index] and waiting:
                slots[index] = waiting.pop(0)
        active = [rows for rows in slots if rows]
        if not active:
            return result
        prompts = [rows for rows in active if is_prefill[rows[0]]]
        if prompts:
            rows = min(prompts, key=lambda rows: rows[0])  # the first admitted
            step: list[int] = []
            while rows and is_prefill[rows[0]] and len(step) < chunk:
                step.append(rows.pop(0))
        else:
            step = [rows.pop(0) for rows in active]
        result.append(step)


# ---------------------------------------------------------------------------- the run


def ranked(
    tasks: list[dict[str, Any]],
    order: str,
    load_ns: Callable[[int], int],
    compute_ns: Callable[[int, int, list[int]], int],
    size: int,
) -> list[dict[str, Any]]:
    """Tasks of one event (given in first appearance) in the event's order."""
    if order in ("sequential", "fifo"):
        return tasks
    if order == "widest":
        return sorted(tasks, key=lambda task: -task["width"])
    if order == "narrowest":
        return sorted(tasks, key=lambda task: task["width"])
    if order == "resident-first":
        here = [task for task in tasks if task["issued"] == task["width"]]
        return here + [task for task in tasks if task["issued"] != task["width"]]
    if order != "johnson":
        raise ValueError(order)
    early, late = [], []
    for task in tasks:
        missing = task["width"] - task["issued"]
        load = load_ns(missing * size) if missing else 0
        compute = compute_ns(0, task["width"], task["row_widths"])
        if load < compute:
            early.append((load, task))
        else:
            late.append((-compute, task))
    early.sort(key=lambda pair: pair[0])
    late.sort(key=lambda pair: pair[0])
    return [task for _, task in early + late]


def simulate(
    experts: np.ndarray,
    *,
    sequence: np.ndarray,
    phase: np.ndarray | None = None,
    n_experts: int,
    n_blocks: int,
    widths: np.ndarray,
    load_ns: Callable[[int], int],
    compute_ns: Callable[[int, int, list[int]], int],
    layer_ns: Callable[[int, int], int],
    order: str = "fifo",
    ranking: Callable[[int, list[int]], list[int]] | None = None,
    cache: str = "lru",
    share: Fraction = Fraction(1, 10),
    scope: str = "layer",
    unit: str = "expert",
    granularity: str = "expert",
    static: dict[Key, int] | None = None,
    prefetch: str = "none",
    guess: np.ndarray | None = None,
    lots: Callable[[int, Key], int] | None = None,
    warmth: dict[Key, int] | None = None,
    batch: int = 1,
    chunk: int = 512,
    log: bool = True,
    sizes: dict[int, int] | None = None,
    weights: list[list[list[int]]] | None = None,
    expected: dict[Key, int] | None = None,
    worth: dict[Key, list[int]] | None = None,
    page_cache: int | None = None,
    cached_ns: Callable[[int], int] | None = None,
    relative: dict[Key, list[int]] | None = None,
    by_rank: dict[int, list[int]] | None = None,
) -> dict[str, Any]:
    """Run a trace whose rows are sorted by (sequence, position).

    experts, widths (blocks), guess: [rows, layers, k]. load_ns(blocks) is one request;
    compute_ns(first, last, row_widths) is blocks [first, last) of one task whose rows ask for
    `row_widths` blocks each; layer_ns(layer, rows). order "random" asks `ranking(event number,
    experts in first appearance)` for the experts in its order. share: exact, of all routed blocks.
    lots: for cache random; warmth: of every entry, for tier-aware. sizes: of a block in each MoE
    layer; load_ns is then of a size instead of blocks. For saliency: weights [rows][layers][k],
    expected weight of every entry, worth (size) of each of its blocks. page_cache: its size, of a
    disk that is read through one; cached_ns is then one request for a size that it holds. For
    prefetching by saliency: weights; the relative size of each block; weights by rank in every MoE
    layer.

    Returns counts: total_ns, events, tasks, hits, partial, skipped (experts of an event that no row
    asks for with a width > 0), skipped_entries ((row, expert) of width 0), blocks_loaded (when
    issued, prefetches included), size_loaded (theirs), blocks_prefetched; and, if `log`, three
    lists in order of time:
    link     (kind load|prefetch, event, layer, expert, first block, blocks, start, end)
    compute  (kind layer|task, event, layer, expert, first block, blocks, start, end); of a layer
             the event is the one it leads to (None: not MoE), the expert None
    log      one dict an event: step, layer, start, end, tasks in first appearance (expert, width,
             resident), order, loads and prefetches issued while it was the newest event, resident
             when it ended ({(layer, expert): blocks that landed}), the prefetch in_flight then.
    """
    assert cache in ("none", "static", "saliency") or cache in KEYS
    salient, source = "saliency" in prefetch, prefetch.removeprefix("saliency(").removesuffix(")")
    assert source in ("none", "previous", "guess", "perfect")
    assert unit in ("expert", "block") and granularity in ("expert", "block")
    assert prefetch == "none" or order != "sequential"
    chosen, asked = np.asarray(experts).tolist(), np.asarray(widths).tolist()
    guessed = None if guess is None else np.asarray(guess).tolist()
    n_layers = np.asarray(experts).shape[1]
    moe = [layer for layer in range(n_layers) if (np.asarray(experts)[:, layer] >= 0).any()]
    plan = steps(sequence, phase, batch, chunk)

    # What is where. Budget blocks count from the moment they are issued.
    room = capacities(share, len(moe), n_experts, n_blocks, scope, unit)
    pool_of = {layer: 0 if scope == "global" else index for index, layer in enumerate(moe)}
    budget: list[dict[Key, int]] = [{} for _ in room]  # per pool: leading blocks of each entry
    used = [0 for _ in room]
    for key, blocks in (static or {}).items():
        budget[pool_of[key[0]]][key] = blocks
        used[pool_of[key[0]]] += blocks
    staging_used = 0  # of 2 * n_blocks: transient blocks of loads
    prefetch_used = 0  # of n_blocks: the prefetch staging
    pages: list[tuple[int, Key, int]] = []  # of the page cache, the most recent last
    staged: dict[Key, int] = {}  # blocks in the prefetch staging that wait for their event
    last_use: dict[Key, int] = {}
    uses: dict[Key, int] = {}
    stay: dict[Key, int] = {}  # events since it came
    came: dict[Key, int] = {}  # the event in which it did
    safe_half: dict[Key, bool] = {}  # slru: protected
    stamp: dict[Key, int] = {}
    this_pass: set[Key] = set()
    recent = dict(expected or {})

    # What happens.
    now = 0
    on_link: dict[str, Any] | None = None
    on_compute: dict[str, Any] | None = None
    tasks: list[dict[str, Any]] = []  # of the running event, ranked
    running = False
    event_keys: set[Key] = set()  # protected: the running event's experts
    predicted_keys: set[Key] = set()  # protected: until their event starts
    predicted: list[Key] = []
    hoped: dict[Key, int] = {}  # saliency: the predicted experts' weights
    last_rows: dict[int, list[int]] = {}  # per layer: rows of its most recent event
    last_tasks: dict[int, list[Key]] = {}  # per layer: tasks of its most recent event

    counts = {"events": 0, "tasks": 0, "hits": 0, "partial": 0, "skipped": 0, "skipped_entries": 0}
    counts |= {"blocks_loaded": 0, "size_loaded": 0, "blocks_prefetched": 0}
    link_log: list[tuple[Any, ...]] = []
    compute_log: list[tuple[Any, ...]] = []
    event_log: list[dict[str, Any]] = []

    # ------------------------------------------------------------ the cache

    def victim_key(key: Key) -> tuple[Any, ...]:
        blocks, last = budget[pool_of[key[0]]][key], last_use.get(key, -1)
        number = counts["events"] - 1
        own = {"lru": (last,), "lfu": (uses.get(key, 0), last), "fifo": (came[key],)}
        own["lfu-in-cache"] = (stay[key], last)
        own["slru"] = (safe_half[key], stamp[key])
        own["least-stale"] = (key in this_pass, key[0], last)
        own["suffix-lru"], own["suffix-lfu"] = (-blocks, last), (-blocks, *own["lfu"])
        if cache == "lfru":
            pool = pool_of[key[0]]
            latest = max([0, *(at for k, at in last_use.items() if pool_of[k[0]] == pool)])
            old = latest - last
            own["lfru"] = (Fraction(stay[key], old) if old else float("inf"), last)
        if cache == "random":
            assert lots is not None
            own["random"] = (lots(number, key),)
        if cache == "tier-aware":
            assert warmth is not None
            own["tier-aware"] = (warmth[key], last)
        return (*own[cache], key)

    def found_again(key: Key, number: int) -> None:
        """slru: an event asks for an entry that is there."""
        pool = pool_of[key[0]]
        safe_half[key], stamp[key] = True, number
        while True:
            inside = [k for k in budget[pool] if safe_half[k]]
            if sum(budget[pool][k] for k in inside) <= room[pool] // 2:
                return
            oldest = min(inside, key=lambda k: (stamp[k], k))
            safe_half[oldest], stamp[oldest] = False, number

    def evictable(pool: int, but: Key) -> int:
        """Blocks of the pool that may be evicted for the expert `but`."""
        safe = event_keys | predicted_keys | {but}
        return used[pool] - sum(budget[pool].get(key, 0) for key in safe)

    def keep(key: Key, blocks: int) -> list[tuple[int, int, int]]:
        """Take blocks of the budget for an entry; returns victims (layer, expert, blocks lost)."""
        pool = pool_of[key[0]]
        safe = event_keys | predicted_keys | {key}
        victims = []
        while room[pool] - used[pool] < blocks:
            victim = min((k for k in budget[pool] if k not in safe), key=victim_key)
            lost = budget[pool][victim]
            if unit == "block":
                lost = min(lost, blocks - (room[pool] - used[pool]))
            if cache.startswith("suffix"):
                lost = 1
            budget[pool][victim] -= lost
            used[pool] -= lost
            if budget[pool][victim] == 0:
                del budget[pool][victim]
            victims.append((*victim, lost))
        if key not in budget[pool]:
            came[key] = stamp[key] = counts["events"] - 1
            safe_half[key] = False
            stay[key] = int(last_use.get(key) == came[key])
        budget[pool][key] = budget[pool].get(key, 0) + blocks
        used[pool] += blocks
        assert used[pool] <= room[pool]
        return victims

    def retain(step: int, layer: int) -> None:
        """saliency: decide what stays after the event of these tasks."""
        nonlocal staging_used
        assert weights is not None and expected is not None and worth is not None
        pool, rows = pool_of[layer], plan[step]
        for expert in range(n_experts):
            recent[layer, expert] = 9 * recent[layer, expert] // 10
            given = [
                weight
                for row in rows
                for routed, weight in zip(chosen[row][layer], weights[row][layer], strict=True)
                if routed == expert
            ]
            recent[layer, expert] += sum(given) // len(rows) // 10

        here = dict(budget[pool])
        keeps, asked, settled = dict(here), {}, set()
        for task in tasks:
            key = task["key"]
            if "prefetch" in task["where"]:
                settled.add(key)
            else:
                keeps[key] = max(here.get(key, 0), task["width"])
                asked[key] = min(here.get(key, 0), task["width"])
        may_go = n_blocks
        while sum(keeps.values()) > room[pool]:
            last_blocks = []
            for key, blocks in keeps.items():
                used_now = blocks <= asked.get(key, 0)
                if blocks and key not in settled and not (used_now and not may_go):
                    saliency = (3 * expected[key] + 7 * recent[key]) * worth[key][blocks - 1]
                    last_blocks.append((saliency, key, used_now))
            _, key, used_now = min(last_blocks)
            may_go -= used_now
            keeps[key] -= 1

        for task in tasks:
            task["keeps"] = keeps.get(task["key"], 0)
            for block in range(task["keeps"], asked.get(task["key"], 0)):
                task["where"][block] = "staging"
                staging_used += 1
        budget[pool] = {key: min(keeps[key], n) for key, n in here.items() if keeps[key]}
        used[pool] = sum(budget[pool].values())
        assert staging_used <= n_blocks

    # ------------------------------------------------------------ an event starts

    def start_event(step: int, layer: int) -> None:
        nonlocal tasks, running, staged, predicted, prefetch_used, hoped
        number = counts["events"]
        counts["events"] += 1
        found: dict[int, list[int]] = {}  # expert: widths of the rows that compute it
        skipped = set()
        for row in plan[step]:
            for expert, width in zip(chosen[row][layer], asked[row][layer], strict=True):
                if expert >= 0 and width > 0:
                    found.setdefault(expert, []).append(width)
                elif expert >= 0:
                    counts["skipped_entries"] += 1
                    skipped.add(expert)
        counts["skipped"] += len(skipped - set(found))

        predicted_keys.clear()
        event_keys.clear()
        if layer == moe[0]:
            this_pass.clear()
        tasks = []
        for expert, row_widths in found.items():
            key, width = (layer, expert), max(row_widths)
            kept = budget[pool_of[layer]].get(key, 0)
            if kept and cache == "slru":
                found_again(key, number)
            stay[key] = stay.get(key, 0) + 1
            this_pass.add(key)
            flying = None
            if on_link and on_link["kind"] == "prefetch" and on_link["key"] == key:
                flying = on_link
                if flying["place"] == "budget":
                    kept -= 1  # in the budget, but not there yet
            where = ["budget"] * kept + ["prefetch"] * staged.pop(key, 0)
            prefetch_used -= where[width:].count("prefetch")  # not asked: freed at once
            where = where[:width]
            resident = len(where)
            if flying and not flying["dropped"] and flying["first"] < width:
                where.append("budget" if flying["place"] == "budget" else "prefetch")
            task = {
                "key": key,
                "width": width,
                "row_widths": row_widths,
                "resident": resident,
                "arrived": resident,  # leading blocks that are there
                "issued": len(where),  # leading blocks that are there or on their way
                "computed": 0,
                "where": where,  # of each issued (or placed) block
                "placed": False,
            }
            if len(where) > resident:
                flying["task"] = task
            tasks.append(task)
            event_keys.add(key)
            last_use[key] = number
            uses[key] = uses.get(key, 0) + 1
            counts["tasks"] += 1
            counts["hits"] += resident == width
            counts["partial"] += 0 < resident < width
        prefetch_used -= sum(staged.values())  # experts that nobody asked for
        staged = {}
        if on_link and on_link["kind"] == "prefetch" and not on_link["task"]:
            on_link["dropped"] = on_link["place"] == "prefetch"

        if cache == "saliency":
            retain(step, layer)
        last_tasks[layer] = [task["key"] for task in tasks]
        last_rows[layer] = plan[step]
        hoped = hope(step, layer) if salient else {}
        predicted = list(hoped) if salient else predict(step, layer)
        predicted_keys.update(predicted)
        appearance = tasks
        if order == "random":
            assert ranking is not None
            by_expert = {task["key"][1]: task for task in tasks}
            tasks = [by_expert[expert] for expert in ranking(number, list(by_expert))]
            assert len(tasks) == len(appearance)
        else:
            tasks = ranked(tasks, order, load_ns, compute_ns, sizes[layer] if sizes else 1)
        running = True
        if log:
            event_log.append(
                {
                    "step": step,
                    "layer": layer,
                    "start": now,
                    "tasks": [(t["key"][1], t["width"], t["resident"]) for t in appearance],
                    "order": [t["key"][1] for t in tasks],
                    "loads": [],
                    "prefetches": [],
                }
            )

    def predict(step: int, layer: int) -> list[Key]:
        """Experts of the next event, as they can be known when this one starts."""
        after = [other for other in moe if other > layer]
        if prefetch == "previous":
            return list(last_tasks.get(after[0] if after else moe[0], []))
        if prefetch == "perfect":
            then, at = (step, after[0]) if after else (step + 1, moe[0])
            rows = plan[then] if then < len(plan) else []
            come = [zip(chosen[row][at], asked[row][at], strict=True) for row in rows]
            flat = [expert for row in come for expert, width in row if expert >= 0 and width > 0]
            return [(at, expert) for expert in dict.fromkeys(flat)]
        if prefetch == "guess" and after:
            assert guessed is not None
            flat = [e for row in plan[step] for e in guessed[row][after[0]] if e >= 0]
            return [(after[0], expert) for expert in dict.fromkeys(flat)]
        return []

    def hope(step: int, layer: int) -> dict[Key, int]:
        """saliency: experts of the next event, and what they will weigh."""
        assert weights is not None and by_rank is not None
        after = [other for other in moe if other > layer]
        at = after[0] if after else moe[0]
        seen: list[tuple[int, int]] = []
        if source == "guess" and after:
            assert guessed is not None
            for row in plan[step]:
                seen += zip(guessed[row][at], by_rank[at], strict=True)
        if source == "previous":
            for row in last_rows.get(at, []):
                seen += zip(chosen[row][at], weights[row][at], strict=True)
        then = step if after else step + 1
        if source == "perfect" and then < len(plan):
            for row in plan[then]:
                seen += zip(chosen[row][at], weights[row][at], strict=True)
        experts = {expert for expert, _ in seen if expert >= 0}
        return {(at, e): max(weight for own, weight in seen if own == e) for e in experts}

    # ------------------------------------------------------------ choices

    def paged(key: Key, size: int, first: int, blocks: int) -> int:
        """What one request takes that goes through the page cache."""
        assert page_cache is not None and cached_ns is not None
        fast = slow = 0
        for block in range(first, first + blocks):
            if (size, key, block) in pages:
                pages.remove((size, key, block))
                fast += size
            else:
                slow += size
            if size <= page_cache:
                pages.append((size, key, block))
            while sum(page[0] for page in pages) > page_cache:
                del pages[0]
        return (load_ns(slow) if slow else 0) + (cached_ns(fast) if fast else 0)

    def begin(kind: str, task: dict[str, Any] | None, key: Key, first: int, blocks: int) -> None:
        """Put one request on the link."""
        nonlocal on_link
        one = sizes[key[0]] if sizes else 1
        size = blocks * one
        end = now + (load_ns(size) if page_cache is None else paged(key, one, first, blocks))
        on_link = {"kind": kind, "task": task, "key": key, "first": first, "blocks": blocks}
        on_link |= {"end": end, "place": "", "dropped": False}
        counts["blocks_loaded"] += blocks
        counts["size_loaded"] += size
        if log:
            event = counts["events"] - 1 + (kind == "prefetch")
            link_log.append((kind, event, *key, first, blocks, now, end))

    def choose_load(task: dict[str, Any]) -> None:
        """Issue the next request of a task, or leave the link idle while staging is full."""
        nonlocal staging_used
        key, first = task["key"], task["issued"]
        if not task["placed"]:
            missing = task["width"] - first
            pool = pool_of[key[0]]
            can_keep = room[pool] - used[pool] + evictable(pool, key)
            if cache in ("none", "static") or "prefetch" in task["where"]:
                kept = 0
            elif cache == "saliency":
                kept = max(0, task["keeps"] - first)
            elif unit == "expert":
                kept = missing if can_keep >= missing else 0
            else:
                kept = min(missing, can_keep)
            transient = missing - kept
            if staging_used + transient > 2 * n_blocks:
                return
            staging_used += transient
            victims = keep(key, kept) if kept else []
            task["where"] += ["budget"] * kept + ["staging"] * transient
            task["placed"] = True
            if log:
                load = {"expert": key[1], "first": first, "blocks": missing, "kept": kept}
                event_log[-1]["loads"].append(load | {"victims": victims})
        blocks = 1 if granularity == "block" else task["width"] - first
        task["issued"] += blocks
        begin("load", task, key, first, blocks)

    def choose_prefetch() -> None:
        nonlocal prefetch_used

        def first_missing(key: Key) -> int:
            return budget[pool_of[key[0]]].get(key, 0) + staged.get(key, 0)

        candidates = predicted
        if salient:
            assert relative is not None
            worths = [
                (-hoped[key] * relative[key][first_missing(key)], key)
                for key in predicted
                if first_missing(key) < n_blocks
            ]
            candidates = [key for worth, key in sorted(worths) if -worth >= 2**48][:1]
        for key in candidates:
            pool = pool_of[key[0]]
            first = first_missing(key)
            if first == n_blocks:
                continue
            victims = []
            free = room[pool] - used[pool]
            admits = cache not in ("none", "static") and key not in staged
            if cache != "saliency":
                free += evictable(pool, key)
            if admits and free > 0:
                victims, place = keep(key, 1), "budget"
            elif prefetch_used < n_blocks:
                prefetch_used, place = prefetch_used + 1, "prefetch"
            else:
                return
            begin("prefetch", None, key, first, 1)
            assert on_link is not None
            on_link["place"] = place
            counts["blocks_prefetched"] += 1
            if log:
                entry = {"layer": key[0], "expert": key[1], "first": first, "place": place}
                event_log[-1]["prefetches"].append(entry | {"victims": victims})
            return

    def choose_link() -> None:
        if running:
            for task in tasks:
                if task["issued"] < task["width"]:
                    choose_load(task)
                    return
                if order == "sequential" and task["computed"] < task["width"]:
                    return
        choose_prefetch()

    def choose_compute() -> None:
        nonlocal on_compute
        for task in tasks:
            first, last = task["computed"], task["width"]
            if first == last:
                continue
            ready = task["arrived"] == task["width"]
            if granularity == "block":
                last = task["arrived"]
                if order != "sequential":
                    ready = first < last
            if ready:
                end = now + compute_ns(first, last, task["row_widths"])
                on_compute = {"kind": "task", "task": task, "first": first, "last": last}
                on_compute["end"] = end
                if log:
                    entry = ("task", counts["events"] - 1, *task["key"], first, last - first)
                    compute_log.append((*entry, now, end))
                return
            if order == "sequential":
                return

    # ------------------------------------------------------------ completions

    def finish_link() -> None:
        nonlocal on_link, prefetch_used
        assert on_link is not None
        request, on_link = on_link, None
        if request["task"]:
            request["task"]["arrived"] += request["blocks"]
        elif request["dropped"]:
            prefetch_used -= 1
        elif request["place"] == "prefetch":
            staged[request["key"]] = staged.get(request["key"], 0) + 1

    def finish_compute() -> None:
        nonlocal on_compute, staging_used, prefetch_used
        assert on_compute is not None
        done, on_compute = on_compute, None
        if done["kind"] == "layer":
            return
        done["task"]["computed"] = done["last"]
        freed = done["task"]["where"][done["first"] : done["last"]]
        staging_used -= freed.count("staging")
        prefetch_used -= freed.count("prefetch")
        assert staging_used >= 0 and prefetch_used >= 0

    def end_event() -> None:
        nonlocal running
        running = False
        event_keys.clear()
        if log:
            resident = {key: blocks for pool in budget for key, blocks in pool.items()}
            flying = None
            if on_link:
                flying = (*on_link["key"], on_link["first"], on_link["place"])
                if on_link["place"] == "budget":
                    resident[on_link["key"]] -= 1
                    if resident[on_link["key"]] == 0:
                        del resident[on_link["key"]]
            event_log[-1] |= {"end": now, "resident": resident, "in_flight": flying}

    # ------------------------------------------------------------ the loop

    visits = iter([(step, layer) for step in range(len(plan)) for layer in range(n_layers)])
    visit: tuple[int, int] | None = None  # the (step, layer) whose layer time runs
    while True:
        # 1. completions
        if on_link and on_link["end"] == now:
            finish_link()
        if on_compute and on_compute["end"] == now:
            finish_compute()
        # 2. ends and starts, until the compute stream is busy or an event waits for blocks
        finished = False
        while on_compute is None:
            if visit and visit[1] in pool_of and not running:
                start_event(*visit)  # its layer time is over
                visit = None
            if running and any(task["computed"] < task["width"] for task in tasks):
                break
            if running:
                end_event()
            visit = next(visits, None)
            if visit is None:
                finished = True
                break
            step, layer = visit
            end = now + layer_ns(layer, len(plan[step]))
            if log:
                event = counts["events"] if layer in pool_of else None
                compute_log.append(("layer", event, layer, None, 0, 0, now, end))
            if end > now:
                on_compute = {"kind": "layer", "end": end}
        if finished:
            break
        # 3. choices
        if on_link is None:
            choose_link()
        if on_compute is None:
            choose_compute()
        # 4. the next completion
        ends = [activity["end"] for activity in (on_link, on_compute) if activity]
        assert ends, "nothing runs and the event is not over"
        now = min(ends)
    assert staging_used == 0
    return {"total_ns": now, **counts, "link": link_log, "compute": compute_log, "log": event_log}
