"""Replay a recording under its own settings, and compare: every block, segment and address.

The device is the recording's: it answers as it did then, with the addresses that it gave. All
decisions are the simulator's: which block serves a request, what is cut off, when the device is
asked and for how much, what is given back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, zip_longest
from operator import ne

import numpy as np

from memtrace.allocator.log import Mark, rows_of
from memtrace.allocator.native import NativeAllocator
from memtrace.allocator.oom import OutOfMemory
from memtrace.allocator.recording import RETURNED, TAKEN, Difference, History
from memtrace.allocator.requests import emptied_pools, settings_of, version_of
from memtrace.allocator.settings import Version
from memtrace.allocator.warm import Event, Warm, WarmOrder, warm_segments
from memtrace.errors import MemtraceError
from memtrace.trace.reader import ProcessTrace, Trace
from memtrace.trace.schema import Action

#: Memory of a device that isn't known: an expandable segment has 9/8 of it in addresses.
_USUAL_DEVICE = 64 << 30
#: One version of each rule for ties between free blocks of one size.
_RULES: tuple[Version, ...] = ((2, 11), (2, 13), (2, 12))


class OtherBlock(Difference):
    """It handed out a free block, where another one was handed out in the recording."""

    def __init__(self, recorded: int, found: int, text: str) -> None:
        super().__init__(text)
        self.recorded, self.found = recorded, found


@dataclass(frozen=True)
class Verified:
    """How far a replay was equal.

    Attributes:
        pid, device: whose history.
        torch: the version whose rules were used.
        events: events of the history.
        equal: those before the first difference.
        difference: what differed first, in one sentence; None: nothing.
        reordered: events that came in another order than recorded: segments that went back.
        warm: blocks that were there when the history began.
        learnt: pairs of segments that were there, of which the choices told the older one.
    """

    pid: int
    device: str
    torch: Version
    events: int
    equal: int
    difference: str | None
    reordered: int
    warm: int
    learnt: int


def verify_run(
    trace: Trace,
    torch: Version | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Verified]:
    """Replay every device of a run whose allocator was recorded, as :func:`verify` does.

    Where the run doesn't say which torch it had, the one whose rules explain most.

    Raises:
        MemtraceError: there is none.
        TraceError: the trace is damaged.
    """
    found = []
    for process in trace.processes:
        for device in sorted(set(process.contexts["device"])):
            segments = np.isin(process.contexts["action"], TAKEN) & process.contexts_on(device)
            if not device.startswith("cuda") or not segments.any():
                continue  # pinned memory has another allocator
            known = torch or version_of(process)
            tried: list[Verified] = []
            for version in [known] if known else _RULES:
                tried.append(verify(process, device, version, progress))
                if tried[-1].difference is None:
                    break
            found.append(max(tried, key=lambda one: one.equal))
    if not found:
        raise MemtraceError(
            f"{trace.folder} has no segments: no caching allocator was recorded (memtrace replay "
            "without --verify simulates one)"
        )
    return found


def verify(
    process: ProcessTrace,
    device: str,
    version: Version,
    progress: Callable[[int], object] = lambda done: None,
) -> Verified:
    """Replay the history of ``device`` by the rules of a version of torch.

    Raises:
        MemtraceError: there is no history to compare with.
        TraceError: the trace is damaged.
    """
    settings = settings_of(process)
    if settings.backend != "native":
        raise MemtraceError(f"{device} was managed by {settings.backend}, which has no history")
    warm = WarmOrder()
    while True:
        history = History.of(process, device)
        # Below a fraction garbage is collected; otherwise the device itself says what fails.
        fraction = history.fraction if settings.gc_threshold > 0 else None
        allocator = NativeAllocator(history.recording, settings, version, fraction=fraction)
        replay = _Replay(history, allocator)
        events = iter(history)
        seeds = list(islice(events, history.seeded))
        reach = settings.reservation(min(history.recording.total, _USUAL_DEVICE))
        found = warm_segments(seeds, history.mapped(), settings.large_segment, reach)
        replay.restore(warm.sort(found))
        difference: Difference | None = None
        try:
            for event in events:
                replay.take(event)
                progress(1)
            replay.end()
        except Difference as differs:
            difference = differs
        if version < (2, 13) or not isinstance(difference, OtherBlock):
            break
        # Which of two segments is older decides between free blocks of one size, and nothing
        # says so of those that were there before: only the choice itself.
        if not warm.learn(difference.recorded, difference.found):
            break
        progress(-replay.first)
    lost = process.manifest.get("dropped") or 0
    text = f"event {replay.first}: {difference}" if difference else None
    if lost and text is None:
        text = f"{lost} events of the process are missing, which nothing can be compared with"
    return Verified(
        pid=process.pid,
        device=device,
        torch=version,
        events=len(history.rows),
        equal=replay.equal,
        difference=text,
        reordered=history.recording.reordered,
        warm=history.warm,
        learnt=warm.learnt,
    )


class _Replay:
    """Puts the events of an operation together, lets the allocator do it, and compares."""

    def __init__(self, history: History, allocator: NativeAllocator) -> None:
        self.equal = 0  # events so far
        self.first = 0  # number of the first event of the operation under way
        self._history = history
        self._allocator = allocator
        self._group: list[Event] = []
        self._tickets: dict[int, int] = {}
        self._ended: set[int] = set()  # private pools

    def restore(self, segments: Sequence[Warm]) -> None:
        """Begin with segments that were there before the history, the oldest first."""
        for segment in segments:
            self._allocator.restore(*segment)
        self.equal = self.first = self._history.seeded

    def take(self, event: Event) -> None:
        """The next event."""
        action = event[0]
        if action in (Action.FREE, Action.FREE_REQUESTED):
            self.end()
            self._free(event)
        elif action in (Action.ALLOC, Action.OOM):
            self._malloc(event)
        else:
            if action == Action.FREE_COMPLETED and any(one[0] in RETURNED for one in self._group):
                self.end()
            self._group.append(event)

    def _free(self, event: Event) -> None:
        action, address = event[:2]
        if not self._allocator.holds(address):
            raise Difference(f"{address:#x} was freed, where nothing lives")
        if action == Action.FREE:
            self._allocator.free(address)
        else:
            self._tickets[address] = self._allocator.free_later(address)
        self._compare([event])

    def end(self) -> None:
        """No allocation followed the completions and returns so far: a cache was emptied."""
        group, self._group = self._group, []
        returned = [one for one in group if one[0] in RETURNED]
        starts = list(emptied_pools([one[5] for one in returned]))
        for (start, pool), (end, _) in pairwise([*starts, (len(returned), 0)]):
            part = returned[start:end]
            self._end_pools(part)
            self._history.recording.script.extend(part)
            self._allocator.empty_cache(pool or None)
        self._complete(group)
        self._compare(group)

    def _end_pools(self, returned: Sequence[Event]) -> None:
        """Private pools whose segments went back had no user any more."""
        for pool in {event[5] for event in returned} - {0} - self._ended:
            self._allocator.begin_pool(pool)
            self._allocator.end_pool(pool)
            self._allocator.release_pool(pool)
            self._ended.add(pool)

    def _complete(self, group: Sequence[Event]) -> None:
        for one in group:
            if one[0] == Action.FREE_COMPLETED:
                if one[1] not in self._tickets:
                    raise Difference(f"{one[1]:#x} came back, which doesn't wait")
                self._allocator.complete(self._tickets.pop(one[1]))

    def _malloc(self, event: Event) -> None:
        """An allocation, with what came back and was given back and taken right before it."""
        action, _, size, requested, stream, pool = event
        group, self._group = self._group, []
        failed = action == Action.OOM
        requested = size if failed else requested
        allocator, recording = self._allocator, self._history.recording
        returned = [one for one in group if one[0] in RETURNED]
        # The cache was emptied before, if the device needn't have been asked, or if just that went
        # back in just that order; and other private pools ended before.
        addresses = [one[1] for one in returned]
        apart = 0
        if returned and (
            allocator.serves(requested, stream, pool or None) or addresses == allocator.releasable()
        ):
            apart = 1 + group.index(returned[-1])
        elif returned and returned[0][5] not in (0, pool):
            own = (one for one in returned if one[5] in (0, pool))
            apart = group.index(next(own, returned[-1]))
            apart += group[apart][5] not in (0, pool)
        self._group, group = group[:apart], group[apart:]
        self.end()
        returned = [one for one in group if one[0] in RETURNED]
        # Where the device was out of memory, all streams were waited for before it was asked again;
        # garbage is collected without waiting.
        late = failed or (bool(returned) and not allocator.collects)
        self._end_pools(returned)
        if not late:
            self._complete(group)
        recording.script.extend(one for one in group if one[0] in (*RETURNED, *TAKEN))
        try:
            allocator.malloc(requested, stream, pool or None)
            if failed:
                raise Difference(f"{size} bytes were found, for which there was no memory")
        except OutOfMemory:
            if not failed:
                raise Difference(f"no memory was found for {requested} bytes") from None
        if late:
            self._complete(group)
        if recording.script:
            raise Difference(f"the device wasn't asked as it was ({len(recording.script)} times)")
        self._compare([*group, event])

    def _compare(self, expected: Sequence[Event]) -> None:
        """Whether the allocator did just what was recorded."""
        wanted: list[tuple[int, ...]] = []
        for action, address, size, requested, *_ in expected:
            if action == Action.FREE:
                wanted.append((Action.FREE_REQUESTED, address, size, requested))
                wanted.append((Action.FREE_COMPLETED, address, size, requested))
            elif action == Action.OOM:
                wanted.append((action, size))
            elif action != Action.RETRY:
                wanted.append((action, address, size, requested))
        found = [
            (action, size) if action == Action.OOM else (action, address, size, requested)
            for _, action, address, size, requested, *_ in rows_of(self._allocator.drain_values())
            if action < min(Mark) and action != Action.RETRY
        ]
        if found != wanted and sorted(found) != sorted(wanted):
            pairs = zip_longest(wanted, found)
            was, came = next(pair for pair in pairs if pair[0] != pair[1])
            text = f"{_words(was)} was recorded, and {_words(came)} came"
            if was and came and was[0] == came[0] == Action.ALLOC:
                raise OtherBlock(was[1], came[1], text)
            raise Difference(text)
        self._history.recording.reordered += sum(map(ne, found, wanted))
        self.equal += len(expected)
        self.first += len(expected)


def _words(event: tuple[int, ...] | None) -> str:
    if event is None:
        return "nothing"
    name = Action(event[0]).name.lower()
    if event[0] == Action.OOM:
        return f"{name} ({event[1]} bytes)"
    return f"{name} at {event[1]:#x} ({event[2]} bytes, {event[3]} requested)"
