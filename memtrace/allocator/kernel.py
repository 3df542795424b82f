"""The rules of :mod:`memtrace.allocator.native` over arrays, compiled by numba.

In the same order and under the same names: a block is a row of ``blocks``, a pool's free blocks of
one stream a sorted row of ``free``. One file, since numba's cache of what it compiled looks at the
file of a function only, not at those of the functions that it calls.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from memtrace.allocator.device import PAGE as DEVICE_PAGE
from memtrace.allocator.log import Mark
from memtrace.allocator.ops import Op
from memtrace.allocator.settings import (
    MIN_BLOCK,
    MIN_LARGE,
    ROUND_LARGE,
    SMALL_LIMIT,
    SMALL_SEGMENT,
)
from memtrace.trace.schema import Action

# Nothing is allocated in here, so no references are counted: that would take most of the time.
_compiled = njit(cache=True, _nrt=False)

# numba freezes globals as plain integers.
_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED = map(
    int, (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED)
)
_SEGMENT_ALLOC, _SEGMENT_FREE = int(Action.SEGMENT_ALLOC), int(Action.SEGMENT_FREE)
_SEGMENT_MAP, _SEGMENT_UNMAP = int(Action.SEGMENT_MAP), int(Action.SEGMENT_UNMAP)
_RETRY, _OOM = int(Action.RETRY), int(Action.OOM)
_SYNC, _REJECTION = int(Mark.SYNC), int(Mark.REJECTION)
_RESET_PEAKS, _RESET_ACCUMULATED = int(Mark.RESET_PEAKS), int(Mark.RESET_ACCUMULATED)
_OP_ALLOC, _OP_FREE, _OP_LATER, _OP_COMPLETE = map(
    int, (Op.ALLOC, Op.FREE, Op.FREE_LATER, Op.COMPLETE)
)
_OP_RECORD, _OP_EMPTY = int(Op.RECORD_STREAM), int(Op.EMPTY_CACHE)
_OP_PEAKS, _OP_ACCUMULATED = int(Op.RESET_PEAKS), int(Op.RESET_ACCUMULATED)
_OP_BEGIN, _OP_END, _OP_RELEASE = map(int, (Op.BEGIN_POOL, Op.END_POOL, Op.RELEASE_POOL))

# Columns of ``blocks``. -1 is no block; ``segment`` and ``page`` are 0 in a cudaMalloc's segment.
ADDRESS, SIZE, REQUESTED, STREAM, POOL, ORDER, ALLOCATED, MAPPED = range(8)
PREV, NEXT, SEGMENT, PAGE, STREAMS, EVENTS, GC_BASE, EARLIER, LATER, NUMBER = range(8, 18)
FIELDS = 18
# Columns of ``pools``.
CALLS, USES, SEGMENTS = range(3)
# Entries of ``now``.
(
    RESERVED, NUMBERED, OP, FREE_BYTES, NEXT_ADDRESS, NEXT_RESERVED, USED, SPARE,
    LOGGED, WAITING, FREEABLE, SCOPES, FIRST_LATER, LAST_LATER, UNKNOWN,
) = range(15)  # fmt: skip
# Entries of ``rules``.
(
    MAX_SPLIT, MAX_ROUNDING, LARGE_SEGMENT, EXPANDABLE, ALLOWED, RESERVATION, COLLECTS, GC_LIMIT,
    THROWS, REJECTED, BY_BLOCK, BY_SEGMENT, SCOPES_CLOSE, OUTERMOST, SOON,
) = range(15)  # fmt: skip
UNLIMITED = 1 << 62
#: More streams than these don't fit into a block's set of streams.
MOST_STREAMS = 62


class State(NamedTuple):
    """All that the allocator knows; sets are numbered ``pool * streams + stream``."""

    blocks: np.ndarray  # (capacity, FIELDS)
    free: np.ndarray  # (sets, room): by size, order, address
    free_count: np.ndarray  # (sets,)
    unmapped: np.ndarray  # (sets, room): by address
    unmapped_count: np.ndarray
    pools: np.ndarray  # (pools, 3)
    now: np.ndarray
    rules: np.ndarray
    divisions: np.ndarray  # (16,)
    streams: np.ndarray  # handles, ascending
    log: np.ndarray  # (room, columns)
    named: np.ndarray  # by the callers' numbers: a block, -1 for none, -2 for one that failed
    waiting: np.ndarray  # (room, 2): stream, block
    scopes: np.ndarray
    freeable: np.ndarray
    scratch: np.ndarray  # as many as blocks


# -- the log -------------------------------------------------------------------------------------


@_compiled
def _row(s, action, address, size, requested, stream, pool, split_blocks, split_bytes):
    row = s.log[s.now[LOGGED]]
    s.now[LOGGED] += 1
    row[0] = s.now[OP]
    row[1] = action
    row[2] = address
    row[3] = size
    row[4] = requested
    row[5] = stream
    row[6] = pool
    row[7] = split_blocks
    row[8] = split_bytes


@_compiled
def _log(s, action):
    _row(s, action, 0, 0, 0, 0, 0, 0, 0)


@_compiled
def _log_block(s, action, b, address, size, split_blocks, split_bytes):
    block = s.blocks[b]
    stream = s.streams[block[STREAM]]
    _row(s, action, address, size, block[REQUESTED], stream, block[POOL], split_blocks, split_bytes)


@_compiled
def _log_segment(s, action, address, size, b):
    block = s.blocks[b]
    _row(s, action, address, size, size, s.streams[block[STREAM]], block[POOL], 0, 0)


# -- blocks and sets -----------------------------------------------------------------------------


@_compiled
def _new(s, pool, stream, address, size, order):
    """A new block: one that was given up, or a row that was never used."""
    b = s.now[SPARE]
    if b >= 0:
        s.now[SPARE] = s.blocks[b, NEXT]
    else:
        b = s.now[USED]
        s.now[USED] += 1
    block = s.blocks[b]
    block[ADDRESS] = address
    block[SIZE] = size
    block[REQUESTED] = 0
    block[STREAM] = stream
    block[POOL] = pool
    block[ORDER] = order
    block[ALLOCATED] = 0
    block[MAPPED] = 1
    block[PREV] = -1
    block[NEXT] = -1
    block[SEGMENT] = 0
    block[PAGE] = 0
    block[STREAMS] = 0
    block[EVENTS] = 0
    block[GC_BASE] = 0
    block[NUMBER] = -1
    return b


@_compiled
def _give_up(s, b):
    s.blocks[b, ADDRESS] = -1
    s.blocks[b, NEXT] = s.now[SPARE]
    s.now[SPARE] = b


@_compiled
def _is_free(s, b):
    block = s.blocks[b]
    return block[ALLOCATED] == 0 and block[EVENTS] == 0 and block[STREAMS] == 0


@_compiled
def _is_split(s, b):
    return s.blocks[b, PREV] >= 0 or s.blocks[b, NEXT] >= 0


@_compiled
def _set_of(s, b):
    return s.blocks[b, POOL] * len(s.streams) + s.blocks[b, STREAM]


@_compiled
def _place(s, of, size, order, address):
    """Where a block of such a key stands, or would, among the free ones."""
    entries, blocks = s.free[of], s.blocks
    low, high = 0, s.free_count[of]
    while low < high:
        middle = (low + high) >> 1
        block = blocks[entries[middle]]
        less = block[SIZE] < size
        if block[SIZE] == size:
            less = block[ORDER] < order
            if block[ORDER] == order:
                less = block[ADDRESS] < address
        if less:
            low = middle + 1
        else:
            high = middle
    return low


@_compiled
def _put(s, b):
    block = s.blocks[b]
    block[GC_BASE] = s.pools[block[POOL], CALLS]
    of = _set_of(s, b)
    place = _place(s, of, block[SIZE], block[ORDER], block[ADDRESS])
    entries, count = s.free[of], s.free_count[of]
    for i in range(count, place, -1):
        entries[i] = entries[i - 1]
    entries[place] = b
    s.free_count[of] = count + 1


@_compiled
def _take_at(s, of, place):
    entries = s.free[of]
    s.free_count[of] -= 1
    for i in range(place, s.free_count[of]):
        entries[i] = entries[i + 1]


@_compiled
def _take(s, b):
    block = s.blocks[b]
    of = _set_of(s, b)
    _take_at(s, of, _place(s, of, block[SIZE], block[ORDER], block[ADDRESS]))


@_compiled
def _put_unmapped(s, b):
    of = _set_of(s, b)
    entries = s.unmapped[of]
    i = s.unmapped_count[of]
    address = s.blocks[b, ADDRESS]
    while i > 0 and s.blocks[entries[i - 1], ADDRESS] > address:
        entries[i] = entries[i - 1]
        i -= 1
    entries[i] = b
    s.unmapped_count[of] += 1


@_compiled
def _take_unmapped(s, b):
    of = _set_of(s, b)
    entries = s.unmapped[of]
    i = 0
    while entries[i] != b:
        i += 1
    s.unmapped_count[of] -= 1
    for j in range(i, s.unmapped_count[of]):
        entries[j] = entries[j + 1]


@_compiled
def _order(s, parent):
    if s.rules[BY_BLOCK] == 0 and s.rules[BY_SEGMENT] == 0:
        return 0
    if s.rules[BY_SEGMENT] and parent >= 0:
        return s.blocks[parent, ORDER]
    s.now[NUMBERED] += 1
    return s.now[NUMBERED]


# -- sizes ---------------------------------------------------------------------------------------


@_compiled
def _round(s, requested):
    if requested > MIN_BLOCK:
        bits = 0
        while requested >> bits:
            bits += 1
        divisions = s.divisions[min(max(bits - 21, 0), 15)]
        if divisions > 1 and requested > MIN_BLOCK * divisions:
            power = 1 << (bits - 1)
            if requested == power:
                return requested
            step = power // divisions
            if step == 0:
                return 2 * power
            return (requested + step - 1) // step * step
    return max(MIN_BLOCK, (requested + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK)


@_compiled
def _segment_size(s, size):
    if size <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return s.rules[LARGE_SEGMENT]
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


# -- the device ----------------------------------------------------------------------------------


@_compiled
def _device_malloc(s, size):
    taken = (size + DEVICE_PAGE - 1) // DEVICE_PAGE * DEVICE_PAGE
    if taken > s.now[FREE_BYTES]:
        return -1
    s.now[FREE_BYTES] -= taken
    address = s.now[NEXT_ADDRESS]
    s.now[NEXT_ADDRESS] += taken
    return address


@_compiled
def _device_reserve(s, size):
    address = s.now[NEXT_RESERVED]
    s.now[NEXT_RESERVED] += (size // (1 << 30) + 1) * (1 << 30)
    return address


# -- malloc --------------------------------------------------------------------------------------


@_compiled
def _malloc(s, requested, stream, pool):
    """A block; -2 where there is none."""
    number = pool
    if number == 0 and s.now[SCOPES] > 0:
        number = s.scopes[0 if s.rules[OUTERMOST] else s.now[SCOPES] - 1]
    closed = number > 0 and s.rules[SCOPES_CLOSE] == 1
    if not closed and s.rules[SOON] == 1:
        _finish_waiting(s, 0)
    size = _round(s, requested)
    found = 2 * number + (1 if size > SMALL_LIMIT else 0)
    b = _take_free(s, found, size, stream)
    if b < 0:
        b = _from_device(s, found, size, stream, not closed)
        if b < 0:
            return -2
    return _hand_out(s, b, size, requested)


@_compiled
def _room(s, b):
    following = s.blocks[b, NEXT]
    if following >= 0 and s.blocks[following, MAPPED] == 0:
        return s.blocks[b, SIZE] + s.blocks[following, SIZE]
    return s.blocks[b, SIZE]


@_compiled
def _take_free(s, pool, size, stream):
    if s.rules[COLLECTS]:
        s.pools[pool, CALLS] += 1
    of = pool * len(s.streams) + stream
    count = s.free_count[of]
    place = _place(s, of, size, -1, -1)
    if place == count:
        return -1
    entries, blocks = s.free[of], s.blocks
    b = entries[place]
    if blocks[b, PAGE]:
        if s.rules[EXPANDABLE]:
            while place + 1 < count and blocks[b, PAGE]:
                following = entries[place + 1]
                if _room(s, following) >= _room(s, b):
                    break
                place += 1
                b = following
        else:
            while blocks[b, PAGE]:
                place += 1
                if place == count:
                    return -1
                b = entries[place]
    limit = s.rules[MAX_SPLIT]
    if size < limit:
        if blocks[b, SIZE] >= limit:
            return -1
    elif blocks[b, SIZE] >= size + s.rules[MAX_ROUNDING]:
        return -1
    _take_at(s, of, place)
    return b


@_compiled
def _hand_out(s, b, size, requested):
    blocks = s.blocks
    rest = blocks[b, SIZE] - size
    plain = blocks[b, PAGE] == 0
    split_blocks, split_bytes = 0, 0
    was_split = plain and _is_split(s, b)
    if blocks[b, POOL] % 2 == 0 or s.rules[EXPANDABLE]:
        splits = rest >= MIN_BLOCK
    else:
        splits = rest > SMALL_LIMIT and size < s.rules[MAX_SPLIT]
    if splits:
        remaining = b
        old = blocks[remaining]
        b = _new(s, old[POOL], old[STREAM], old[ADDRESS], size, _order(s, remaining))
        block = blocks[b]
        block[SEGMENT] = old[SEGMENT]
        block[PAGE] = old[PAGE]
        block[PREV] = old[PREV]
        if block[PREV] >= 0:
            blocks[block[PREV], NEXT] = b
        block[NEXT] = remaining
        old[PREV] = b
        old[ADDRESS] += size
        old[SIZE] = rest
        _put(s, remaining)
        if was_split:
            split_bytes = -size
        elif plain:
            split_blocks, split_bytes = 1, rest
    elif was_split:
        split_blocks, split_bytes = -1, -blocks[b, SIZE]
    block = blocks[b]
    block[ALLOCATED] = 1
    block[REQUESTED] = requested
    _log_block(s, _ALLOC, b, block[ADDRESS], block[SIZE], split_blocks, split_bytes)
    return b


@_compiled
def _from_device(s, pool, size, stream, retries):
    want = _segment_size(s, size)
    if s.rules[COLLECTS]:
        _collect_garbage(s)
    b = _new_block(s, pool, want, size, stream)
    if b == -1 and _release_available(s, pool, size, stream):
        b = _new_block(s, pool, want, size, stream)
    if b == -1 and retries:
        _release_cached(s)
        _log(s, _RETRY)
        b = _new_block(s, pool, want, size, stream)
    if b == -1:
        _row(s, _OOM, s.now[FREE_BYTES], size, want, s.streams[stream], 0, 0, 0)
    return b


@_compiled
def _new_block(s, pool, want, size, stream):
    """-1: there is no room; -3: nothing is tried."""
    if s.now[RESERVED] + want > s.rules[ALLOWED]:
        return -1
    if s.rules[THROWS] and s.now[RESERVED] + want > s.rules[REJECTED]:
        _log(s, _REJECTION)
        return -3
    if s.rules[EXPANDABLE]:
        return _grow(s, pool, size, stream)
    address = _device_malloc(s, want)
    if address < 0:
        return -1
    s.now[RESERVED] += want
    s.pools[pool - pool % 2, SEGMENTS] += 1
    b = _new(s, pool, stream, address, want, _order(s, -1))
    _log_segment(s, _SEGMENT_ALLOC, address, want, b)
    return b


# -- expandable segments -------------------------------------------------------------------------


@_compiled
def _grow(s, pool, size, stream):
    blocks = s.blocks
    b = _expandable_block(s, pool, size, stream)
    if b < 0:
        return -1
    if blocks[b, MAPPED] == 0 and not _map(s, b, min(blocks[b, SIZE], size)):
        return -1
    while blocks[b, SIZE] < size:
        following = blocks[b, NEXT]
        if not _map(s, following, min(blocks[following, SIZE], size - blocks[b, SIZE])):
            return -1
        b = following
    _take(s, b)
    return b


@_compiled
def _has_room(s, b, size):
    room = 0
    while b >= 0 and room < size and _is_free(s, b):
        room += s.blocks[b, SIZE]
        b = s.blocks[b, NEXT]
    return room >= size


@_compiled
def _expandable_block(s, pool, size, stream):
    of = pool * len(s.streams) + stream
    for i in range(s.unmapped_count[of]):
        start = s.unmapped[of, i]
        before = s.blocks[start, PREV]
        if before >= 0 and _is_free(s, before):
            start = before
        if _has_room(s, start, size):
            return start
    page = SMALL_SEGMENT if pool % 2 == 0 else s.rules[LARGE_SEGMENT]
    whole = max((s.rules[RESERVATION] + page - 1) // page, 1) * page
    if whole < size:
        return -1
    address = _device_reserve(s, whole)
    b = _new(s, pool, stream, address, whole, _order(s, -1))
    block = s.blocks[b]
    block[SEGMENT] = address
    block[PAGE] = page
    block[MAPPED] = 0
    _put_unmapped(s, b)
    return b


@_compiled
def _map(s, b, size):
    block = s.blocks[b]
    page = block[PAGE]
    size = (size + page - 1) // page * page
    if size > s.now[FREE_BYTES]:
        return False
    s.now[FREE_BYTES] -= size
    address = block[ADDRESS]
    _take_unmapped(s, b)
    block[MAPPED] = 1
    if size < block[SIZE]:
        _cut(s, b, size, 0)
    _merge(s, b, block[PREV])
    _merge(s, b, block[NEXT])
    _put(s, b)
    s.now[RESERVED] += size
    _log_segment(s, _SEGMENT_MAP, address, size, b)
    return True


@_compiled
def _unmap(s, b):
    blocks = s.blocks
    block = blocks[b]
    page = block[PAGE]
    before = (page - (block[ADDRESS] - block[SEGMENT]) % page) % page
    if before >= block[SIZE]:
        return
    size = (block[SIZE] - before) // page * page
    if size <= 0:
        return
    _take(s, b)
    if before:
        head = _new(s, block[POOL], block[STREAM], block[ADDRESS], before, _order(s, b))
        blocks[head, SEGMENT] = block[SEGMENT]
        blocks[head, PAGE] = page
        blocks[head, PREV] = block[PREV]
        blocks[head, NEXT] = b
        if block[PREV] >= 0:
            blocks[block[PREV], NEXT] = head
        block[PREV] = head
        block[ADDRESS] += before
        block[SIZE] -= before
        _put(s, head)
    if size < block[SIZE]:
        _cut(s, b, size, 1)
    address = block[ADDRESS]
    block[MAPPED] = 0
    _merge(s, b, block[PREV])
    _merge(s, b, block[NEXT])
    _put_unmapped(s, b)
    s.now[RESERVED] -= size
    s.now[FREE_BYTES] += size
    s.pools[block[POOL] - block[POOL] % 2, SEGMENTS] -= 1
    _log_segment(s, _SEGMENT_UNMAP, address, size, b)
    if not _is_split(s, b):
        _take_unmapped(s, b)
        _give_up(s, b)


@_compiled
def _cut(s, b, size, mapped):
    blocks = s.blocks
    block = blocks[b]
    rest = _new(
        s,
        block[POOL],
        block[STREAM],
        block[ADDRESS] + size,
        block[SIZE] - size,
        _order(s, b),
    )
    blocks[rest, SEGMENT] = block[SEGMENT]
    blocks[rest, PAGE] = block[PAGE]
    blocks[rest, MAPPED] = mapped
    blocks[rest, PREV] = b
    blocks[rest, NEXT] = block[NEXT]
    if block[NEXT] >= 0:
        blocks[block[NEXT], PREV] = rest
    block[NEXT] = rest
    block[SIZE] = size
    if mapped:
        _put(s, rest)
    else:
        _put_unmapped(s, rest)


# -- free ----------------------------------------------------------------------------------------


@_compiled
def _release(s, b):
    block = s.blocks[b]
    block[ALLOCATED] = 0
    _log_block(s, _FREE_REQUESTED, b, block[ADDRESS], block[SIZE], 0, 0)


@_compiled
def _free(s, b):
    _release(s, b)
    block = s.blocks[b]
    if block[STREAMS] == 0:
        _finish(s, b)
        return
    for stream in range(len(s.streams)):
        if block[STREAMS] >> stream & 1:
            s.waiting[s.now[WAITING], 0] = stream
            s.waiting[s.now[WAITING], 1] = b
            s.now[WAITING] += 1
            block[EVENTS] += 1
    block[STREAMS] = 0


@_compiled
def _free_later(s, b, number):
    _release(s, b)
    block = s.blocks[b]
    block[STREAMS] = 0
    block[EVENTS] = 1
    block[NUMBER] = number
    block[EARLIER] = s.now[LAST_LATER]
    block[LATER] = -1
    if s.now[LAST_LATER] >= 0:
        s.blocks[s.now[LAST_LATER], LATER] = b
    else:
        s.now[FIRST_LATER] = b
    s.now[LAST_LATER] = b


@_compiled
def _complete(s, b):
    block = s.blocks[b]
    earlier, later = block[EARLIER], block[LATER]
    if earlier >= 0:
        s.blocks[earlier, LATER] = later
    else:
        s.now[FIRST_LATER] = later
    if later >= 0:
        s.blocks[later, EARLIER] = earlier
    else:
        s.now[LAST_LATER] = earlier
    block[EVENTS] = 0
    _finish(s, b)


@_compiled
def _finish(s, b):
    block = s.blocks[b]
    address, size = block[ADDRESS], block[SIZE]
    split_blocks, split_bytes = 0, 0
    for neighbour in (block[PREV], block[NEXT]):
        merged = _merge(s, b, neighbour)
        if merged:
            split_blocks -= 1
            split_bytes -= merged
    _put(s, b)
    if block[PAGE]:
        split_blocks, split_bytes = 0, 0
    elif _is_split(s, b):
        split_blocks += 1
        split_bytes += block[SIZE]
    _log_block(s, _FREE_COMPLETED, b, address, size, split_blocks, split_bytes)


@_compiled
def _merge(s, b, other):
    blocks = s.blocks
    if other < 0 or not _is_free(s, other) or blocks[other, MAPPED] != blocks[b, MAPPED]:
        return 0
    if blocks[other, MAPPED]:
        _take(s, other)
    else:
        _take_unmapped(s, other)
    block, old = blocks[b], blocks[other]
    if block[PREV] == other:
        block[ADDRESS] = old[ADDRESS]
        block[PREV] = old[PREV]
        if block[PREV] >= 0:
            blocks[block[PREV], NEXT] = b
    else:
        block[NEXT] = old[NEXT]
        if block[NEXT] >= 0:
            blocks[block[NEXT], PREV] = b
    block[SIZE] += old[SIZE]
    merged = old[SIZE]
    _give_up(s, other)
    return merged


@_compiled
def _finish_waiting(s, number):
    """Stream by stream, in the order in which a free first waited for each.

    Only blocks of private pool ``number``, unless that is 0.
    """
    count = s.now[WAITING]
    if count == 0:
        return
    seen, kept = 0, 0
    for i in range(count):
        stream = s.waiting[i, 0]
        if seen >> stream & 1:
            continue
        seen |= 1 << stream
        for j in range(i, count):
            if s.waiting[j, 0] != stream:
                continue
            b = s.waiting[j, 1]
            if number and s.blocks[b, POOL] // 2 != number:
                s.waiting[count + kept, 0] = stream
                s.waiting[count + kept, 1] = b
                kept += 1
                continue
            s.blocks[b, EVENTS] -= 1
            if s.blocks[b, EVENTS] == 0:
                _finish(s, b)
    for i in range(kept):
        s.waiting[i, 0], s.waiting[i, 1] = s.waiting[count + i, 0], s.waiting[count + i, 1]
    s.now[WAITING] = kept


@_compiled
def _synchronize(s, number):
    _log(s, _SYNC)
    _finish_waiting(s, number)
    b = s.now[FIRST_LATER]
    while b >= 0:
        following = s.blocks[b, LATER]
        if number == 0 or s.blocks[b, POOL] // 2 == number:
            _complete(s, b)
        b = following


# -- giving memory back --------------------------------------------------------------------------


@_compiled
def _release_available(s, pool, size, stream):
    limit = s.rules[MAX_SPLIT]
    if limit == UNLIMITED:
        return False
    need = max(size, limit)
    of = pool * len(s.streams) + stream
    entries, blocks = s.free[of], s.blocks
    place = _place(s, of, need, -1, -1)
    if place < s.free_count[of] and blocks[entries[place], PAGE] == 0:
        _give_back(s, entries[place])
        return True
    released = 0
    while released < need and place > 0 and blocks[entries[place - 1], SIZE] >= limit:
        place -= 1
        b = entries[place]
        if blocks[b, PAGE] == 0:
            released += blocks[b, SIZE]
            _give_back(s, b)
    return released >= need


@_compiled
def _release_cached(s):
    if not (s.now[SCOPES] > 0 and s.rules[SCOPES_CLOSE] == 1):
        _synchronize(s, 0)
        _release_free(s, 1)
        _release_free(s, 0)
    _release_private(s, 0)


@_compiled
def _release_private(s, only):
    """What can be freed of private pools; of one alone, unless ``only`` is 0."""
    kept = 0
    for i in range(s.now[FREEABLE]):
        number = s.freeable[i]
        if only == 0 or number == only:
            _release_free(s, 2 * number)
            _release_free(s, 2 * number + 1)
            if s.pools[2 * number, SEGMENTS] == 0:
                for pool in (2 * number, 2 * number + 1):
                    s.pools[pool, CALLS] = 0
                    s.pools[pool, USES] = 0
                continue
        s.freeable[kept] = number
        kept += 1
    s.now[FREEABLE] = kept


@_compiled
def _empty_pool(s, number):
    for i in range(s.now[FREEABLE]):
        if s.freeable[i] == number:
            _synchronize(s, number)
            _release_private(s, number)
            break


@_compiled
def _release_free(s, pool):
    growing = 0
    for stream in range(len(s.streams)):
        of = pool * len(s.streams) + stream
        i = 0
        while i < s.free_count[of]:
            b = s.free[of, i]
            if s.blocks[b, PAGE]:
                s.scratch[growing] = b
                growing += 1
                i += 1
            elif _is_split(s, b):
                i += 1
            else:
                _give_back(s, b)
    for i in range(growing):
        _unmap(s, s.scratch[i])


@_compiled
def _give_back(s, b):
    block = s.blocks[b]
    _take(s, b)
    s.now[RESERVED] -= block[SIZE]
    s.now[FREE_BYTES] += (block[SIZE] + DEVICE_PAGE - 1) // DEVICE_PAGE * DEVICE_PAGE
    s.pools[block[POOL] - block[POOL] % 2, SEGMENTS] -= 1
    _log_segment(s, _SEGMENT_FREE, block[ADDRESS], block[SIZE], b)
    _give_up(s, b)


@_compiled
def _collect_garbage(s):
    limit = s.rules[GC_LIMIT]
    if s.now[RESERVED] <= limit:
        return
    target = s.now[RESERVED] - limit
    total, count = 0, 0
    streams = len(s.streams)
    for stream in range(streams):
        of = streams + stream
        for i in range(s.free_count[of]):
            b = s.free[of, i]
            if not _is_split(s, b):
                total += s.pools[1, CALLS] - s.blocks[b, GC_BASE]
                count += 1
    reclaimed, freed = 0, True
    while reclaimed < target and freed and count > 0:
        threshold = total / count
        freed = False
        for stream in range(streams):
            of = streams + stream
            i = 0
            while i < s.free_count[of]:
                b = s.free[of, i]
                age = s.pools[1, CALLS] - s.blocks[b, GC_BASE]
                if not _is_split(s, b) and s.blocks[b, PAGE] == 0 and age >= threshold:
                    freed = True
                    reclaimed += s.blocks[b, SIZE]
                    total -= age
                    count -= 1
                    _give_back(s, b)
                else:
                    i += 1


# -- operations ----------------------------------------------------------------------------------


@_compiled
def _tight(s):
    """Whether the next operation might need more room than there is.

    It can cut each block into three, and log each once.
    """
    most = 4 * (s.now[USED] + 4)
    return (
        most > len(s.blocks)
        or most > s.free.shape[1]
        or most > s.unmapped.shape[1]
        or s.now[LOGGED] + most > len(s.log)
        or 2 * (s.now[WAITING] + len(s.streams)) > len(s.waiting)
        or s.now[SCOPES] + 1 > len(s.scopes)
    )


@_compiled
def run(s, kinds, numbers, sizes, streams, pools, start):
    """Do operations from ``start`` on; the first that there was no room for, or their count."""
    for i in range(start, len(kinds)):
        if _tight(s):
            return i
        kind, number = kinds[i], numbers[i]
        if kind == _OP_ALLOC:
            b = -2
            if sizes[i] > 0:
                b = _malloc(s, sizes[i], streams[i], pools[i])
            s.named[number] = b
        elif kind <= _OP_RECORD:
            b = s.named[number]
            if b == -1:
                s.now[UNKNOWN] = number
                return i
            if kind == _OP_RECORD:
                if b >= 0 and s.blocks[b, STREAM] != streams[i]:
                    s.blocks[b, STREAMS] |= 1 << streams[i]
            elif kind == _OP_LATER:
                if b >= 0:
                    _free_later(s, b, number)
            else:
                s.named[number] = -1
                if b >= 0 and kind == _OP_FREE:
                    _free(s, b)
                elif b >= 0 and s.blocks[b, EVENTS] > 0 and s.blocks[b, NUMBER] == number:
                    _complete(s, b)
        else:
            _manage(s, kind, pools[i])
        s.now[OP] += 1
    return len(kinds)


@_compiled
def _manage(s, kind, pool):
    if kind == _OP_EMPTY and pool > 0:
        _empty_pool(s, pool)
    elif kind == _OP_EMPTY:
        _release_cached(s)
    elif kind == _OP_PEAKS:
        _log(s, _RESET_PEAKS)
    elif kind == _OP_ACCUMULATED:
        _log(s, _RESET_ACCUMULATED)
    elif kind == _OP_BEGIN:
        s.pools[2 * pool, USES] += 1
        s.scopes[s.now[SCOPES]] = pool
        s.now[SCOPES] += 1
    elif kind == _OP_END:
        i = 0
        while s.scopes[i] != pool:
            i += 1
        s.now[SCOPES] -= 1
        for j in range(i, s.now[SCOPES]):
            s.scopes[j] = s.scopes[j + 1]
    elif kind == _OP_RELEASE:
        s.pools[2 * pool, USES] -= 1
        if s.pools[2 * pool, USES] == 0:
            s.freeable[s.now[FREEABLE]] = pool
            s.now[FREEABLE] += 1
