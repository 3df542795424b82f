"""Does our allocator do what PyTorch's did? Golden vectors, done again and compared."""

import json
from bisect import insort
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrace.allocator.device import PAGE, Device
from memtrace.allocator.log import Log, Mark
from memtrace.allocator.native import NativeAllocator
from memtrace.allocator.oom import OutOfMemory
from memtrace.allocator.ops import Op, Ops
from memtrace.allocator.statistics import Statistics
from memtrace.allocator.vectors import Event, Vector
from memtrace.trace.schema import Action


@dataclass(frozen=True)
class Difference:
    """Where an allocator of ours did something else for the first time."""

    operation: int
    description: str  # the operation itself
    what: str
    expected: Any
    found: Any


def compare(vector: Vector) -> Difference | None:
    """Do the operations and compare every address, event, counter and message."""
    device = (_LowestGap if vector.reuses else Device)(vector.total, vector.outside)
    allocator = _Listened(
        device,
        vector.settings,
        vector.version,
        fraction=vector.fraction,
        completion=vector.completion,
    )
    log = allocator.run(vector.ops)
    unordered: set[int] = set()
    found = (
        _trace_difference(vector, log, unordered),
        _result_difference(vector, log),
        _statistics_difference(vector, log, unordered),
        _message_difference(vector, log, allocator.messages),
    )
    return min(filter(None, found), key=lambda one: one.operation, default=None)


class _Listened(NativeAllocator):
    """Keeps what failures said."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.messages: list[str] = []

    def malloc(self, requested: int, stream: int = 0, pool: int | None = None) -> int:
        try:
            return super().malloc(requested, stream, pool)
        except OutOfMemory as error:
            failure = error.failure
            self.messages.append(failure.message(process=failure.total - failure.free))
            raise


class _LowestGap(Device):
    """Addresses of the virtual GPU: the lowest that are free."""

    def __init__(self, total: int, outside: int = 0) -> None:
        super().__init__(total, outside)
        self._taken: list[tuple[int, int]] = []
        self._reserved: list[tuple[int, int]] = []

    def malloc(self, size: int) -> int | None:
        if super().malloc(size) is None:
            return None
        return _place(self._taken, 0x20 << 40, -(-size // PAGE) * PAGE)

    def free(self, address: int, size: int) -> None:
        super().free(address, size)
        self._taken.remove((address, -(-size // PAGE) * PAGE))

    def reserve(self, size: int) -> int:
        return _place(self._reserved, 0x48 << 40, size)

    def unreserve(self, address: int, size: int) -> None:
        self._reserved.remove((address, size))


def _place(taken: list[tuple[int, int]], address: int, size: int) -> int:
    for start, length in taken:
        if start - address >= size:
            break
        address = start + length
    insort(taken, (address, size))
    return address


# -- comparisons ---------------------------------------------------------------------------------


def _difference(vector: Vector, operation: int, what: str, expected: Any, found: Any) -> Difference:
    operation = min(operation, len(vector.operations) - 1)
    return Difference(operation, json.dumps(vector.operations[operation]), what, expected, found)


def _trace_difference(vector: Vector, log: Log, unordered: set[int]) -> Difference | None:
    """The first event that differs; ``unordered``: gets the operations that completed
    frees in another order."""
    is_event = (log["action"] < min(Mark)) & (log["action"] != Action.RETRY)
    number = log["op"][is_event].tolist()
    found: list[Event] = [tuple(row) for row in log.events().tolist()]
    expected = vector.trace
    movable = _movable(vector.ops)
    place, end = 0, min(len(expected), len(found))
    while place < end:
        if expected[place] == found[place]:
            place += 1
            continue
        action, last = found[place][0], place
        while (
            last < end
            and action in movable
            and expected[last][0] == found[last][0] == action
            and number[last] == number[place]
        ):
            last += 1
        if last == place or sorted(expected[place:last]) != sorted(found[place:last]):
            break
        if action == Action.FREE_COMPLETED:
            unordered.add(number[place])
        place = last
    if place == len(expected) == len(found):
        return None
    operation = number[place] if place < len(number) else len(vector.operations)
    theirs, ours = (
        _event_text(one[place]) if place < len(one) else "no more events"
        for one in (expected, found)
    )
    return _difference(vector, operation, f"event {place}", theirs, ours)


def _movable(ops: Ops) -> set[Action]:
    """What one operation may do in another order, where PyTorch walks a hash map: of the private
    pools that were released, or of the streams that blocks wait for."""
    movable = set()
    if Op.RELEASE_POOL in ops.kind:
        movable |= {Action.SEGMENT_FREE, Action.SEGMENT_UNMAP}
    if len(np.unique(ops.stream[ops.kind == Op.RECORD_STREAM])) > 1:
        movable.add(Action.FREE_COMPLETED)
    return movable


def _event_text(event: Event) -> str:
    action, address, size, stream = event
    where = f"{address} free" if action == Action.OOM else f"0x{address:x}"
    return f"{Action(action).name.lower()} {where} {size} stream 0x{stream:x}"


def _result_difference(vector: Vector, log: Log) -> Difference | None:
    given = log["action"] == Action.ALLOC
    addresses = dict(zip(log["op"][given].tolist(), log["address"][given].tolist(), strict=True))
    failed = set(log["op"][np.isin(log["action"], (Action.OOM, Mark.REJECTION))].tolist())
    numbers = np.flatnonzero(vector.ops.kind == Op.ALLOC).tolist()
    for number, expected in zip(numbers, vector.results, strict=True):
        found = "oom" if number in failed else addresses.get(number, 0)
        if found != expected:
            theirs, ours = (hex(one) if type(one) is int else one for one in (expected, found))
            return _difference(vector, number, "address", theirs, ours)
    return None


def _statistics_difference(vector: Vector, log: Log, unordered: set[int]) -> Difference | None:
    numbers = np.array(sorted(vector.statistics), dtype=np.int64)
    if not len(numbers) or not vector.columns:
        return None
    last = np.searchsorted(log["op"], numbers, side="right") - 1
    after = Statistics(log, vector.settings.max_split_size).at(last)
    found = np.stack([after[name] for name in vector.columns], axis=1)
    expected = np.array([vector.statistics[number] for number in numbers.tolist()])
    wrong = found != expected
    if unordered:  # in what order blocks merge decides how many splits there are on the way
        for column, name in enumerate(vector.columns):
            if name.startswith("inactive_split") and not name.endswith("current"):
                wrong[numbers >= min(unordered), column] = False
    if not wrong.any():
        return None
    row, column = np.argwhere(wrong)[0].tolist()
    values = int(expected[row, column]), int(found[row, column])
    return _difference(vector, int(numbers[row]), vector.columns[column], *values)


def _message_difference(vector: Vector, log: Log, messages: list[str]) -> Difference | None:
    if vector.messages is None:
        return None
    failed = log["op"][np.isin(log["action"], (Action.OOM, Mark.REJECTION))].tolist()
    for place in range(max(len(messages), len(vector.messages))):
        expected, found = (
            repr(one[place]) if place < len(one) else "no more messages"
            for one in (vector.messages, messages)
        )
        if expected != found:
            operation = failed[place] if place < len(failed) else len(vector.operations)
            return _difference(vector, operation, "message", expected, found)
    return None
