"""Tasks in their order, and the shortest time that any order could take."""

from __future__ import annotations

from crisp.policy.order import (
    by_random_key,
    hash_key,
    johnson,
    narrowest_first,
    resident_first,
    widest_first,
)
from crisp.sim.compiling import compiled
from crisp.sim.fast.custom import address_of, call_address
from crisp.sim.fast.state import (
    ALONE,
    BY_BLOCK,
    CUSTOM,
    EVENT,
    FIRST_SEEN,
    ISSUED,
    JOB_COMPUTE,
    JOB_LOAD,
    JOHNSON,
    KEY,
    KEY_AT,
    KIND,
    NARROWEST,
    ORDER,
    ORDER_BOUND,
    ORDER_DRAWN,
    RESIDENT_FIRST,
    SECOND_KEY,
    SEED,
    SLOT_OF,
    SORTED,
    TIMED,
    WIDEST,
    WIDTH,
    Ints,
)

_widest_first, _narrowest_first = compiled(widest_first), compiled(narrowest_first)
_resident_first, _johnson = compiled(resident_first), compiled(johnson)
_by_random_key, _hash_key = compiled(by_random_key), compiled(hash_key)


@compiled
def rank(
    rules: Ints,
    load_ns: Ints,
    now: Ints,
    slots: Ints,
    jobs: Ints,
    piece_ns: Ints,
    count: int,
    custom: Ints | None,
) -> None:
    """Put the slots of an event's tasks into SLOT_OF, by rank."""
    order = rules[ORDER]
    if order == FIRST_SEEN or count < 2:
        for slot in range(count):
            slots[SLOT_OF, slot] = slot
        return
    for slot in range(count):
        width = slots[WIDTH, slot]
        missing = max(0, width - slots[ISSUED, slot])
        if custom is not None and order == CUSTOM:
            load = load_ns[missing] if rules[TIMED] else missing
            compute = _whole(rules, slots, piece_ns, slot) if rules[TIMED] else 0
            drawn = _hash_key(rules[SEED], now[EVENT], slot) if rules[ORDER_DRAWN] else 0
            first = address_of(jobs[KEY]) + 8 * slot
            second = address_of(jobs[SECOND_KEY]) + 8 * slot
            call_address(custom[KEY_AT], (width, load, compute, drawn, first, second))
            continue
        if order == WIDEST:
            key = _widest_first(width, missing, 0, 0)
        elif order == NARROWEST:
            key = _narrowest_first(width, missing, 0, 0)
        elif order == RESIDENT_FIRST:
            key = _resident_first(width, missing, 0, 0)
        elif order == JOHNSON:
            key = _johnson(width, load_ns[missing], _whole(rules, slots, piece_ns, slot), 0)
        else:
            key = _by_random_key(width, missing, 0, _hash_key(rules[SEED], now[EVENT], slot))
        jobs[KEY, slot], jobs[SECOND_KEY, slot] = key
    _sort(jobs, slots[SLOT_OF], count)


@compiled
def _whole(rules: Ints, slots: Ints, piece_ns: Ints, slot: int) -> int:
    """Return the ns of a whole task as one piece."""
    ns: int = piece_ns[slots[KIND, slot], slots[WIDTH, slot] - 1 if rules[BY_BLOCK] else 0]
    return ns


@compiled
def best_order(
    rules: Ints, load_ns: Ints, now: Ints, slots: Ints, jobs: Ints, least_ns: Ints, count: int
) -> None:
    """Note the makespan of an event's loads and computations in their best order, in ns, and what
    the computations take.

    A job is a task, or at granularity block a block: see `crisp.sim.streams`.
    """
    if count == 2 and rules[BY_BLOCK] == 0:  # the shorter of two: most events are such
        load0, compute0 = _job(load_ns, slots, least_ns, 0)
        load1, compute1 = _job(load_ns, slots, least_ns, 1)
        both = load0 + load1
        now[ALONE] += compute0 + compute1
        now[ORDER_BOUND] += min(
            max(both, load0 + compute0) + compute1, max(both, load1 + compute1) + compute0
        )
        return
    total = 0
    for slot in range(count):
        if rules[BY_BLOCK]:
            for block in range(slots[WIDTH, slot]):
                load = load_ns[1] if block >= slots[ISSUED, slot] else 0
                _add_job(jobs, total, load, least_ns[slots[KIND, slot], block])
                total += 1
        else:
            load, compute = _job(load_ns, slots, least_ns, slot)
            _add_job(jobs, total, load, compute)
            total += 1
    _sort(jobs, jobs[SORTED], total)
    loaded = computed = 0
    for turn in range(total):
        job = jobs[SORTED, turn]
        loaded += jobs[JOB_LOAD, job]
        now[ALONE] += jobs[JOB_COMPUTE, job]
        computed = max(loaded, computed) + jobs[JOB_COMPUTE, job]
    now[ORDER_BOUND] += computed


@compiled
def _job(load_ns: Ints, slots: Ints, least_ns: Ints, slot: int) -> tuple[int, int]:
    """Return (ns to load, ns to compute) of a task at granularity expert."""
    missing = max(0, slots[WIDTH, slot] - slots[ISSUED, slot])
    return load_ns[missing], least_ns[slots[KIND, slot], 0]


@compiled
def _add_job(jobs: Ints, job: int, load: int, compute: int) -> None:
    jobs[JOB_LOAD, job], jobs[JOB_COMPUTE, job] = load, compute
    jobs[KEY, job], jobs[SECOND_KEY, job] = _johnson(0, load, compute, 0)


@compiled
def _sort(jobs: Ints, order: Ints, count: int) -> None:
    """Sort by both keys; ties stay as they are. Events are short, or mostly in order."""
    for job in range(count):
        key, second, place = jobs[KEY, job], jobs[SECOND_KEY, job], job
        while place > 0:
            before = order[place - 1]
            other = jobs[KEY, before]
            if other < key or (other == key and jobs[SECOND_KEY, before] <= second):
                break
            order[place] = before
            place -= 1
        order[place] = job
