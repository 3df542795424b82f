"""From the allocator's history, as PyTorch keeps it, to events of a trace.

An entry says an action, an address, *requested* bytes, a stream, a time, and the text that the
allocating thread had set as its memory metadata. What an event says beyond that follows from the
blocks, which a :class:`~memtrace.allocator.layout.Layout` keeps.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from memtrace.allocator.layout import Block, Layout, LayoutError, Segment, pool_name
from memtrace.allocator.metadata import Names
from memtrace.trace.schema import Action

Entry = Mapping[str, Any]
#: (stream, pool): what an event says of a block beside its bytes and component.
Where = tuple[int, str | None]

#: time_us, id, bytes, requested, context.
FIELDS = 5

#: Scopes of kind op: of what was there when the history began, and of what it doesn't say.
BEFORE, MISSED = "before the recording", "missed by the recording"

RETURNED = ("segment_free", "segment_unmap")
#: What a retry ends in.
AFTER_RETRY = ("segment_alloc", "segment_map", "oom")


class Contexts(Protocol):
    """What numbers contexts: the ledger of a recorder, or that of an import."""

    def context(
        self,
        action: Action,
        device: str,
        component: str | None,
        scope: int,
        previous: str | None = None,
        stack: int = -1,
        stream: int = 0,
        pool: str | None = None,
    ) -> int: ...


class _Owner:
    """A component and a place, with the contexts of the frees of its blocks."""

    __slots__ = ("completed", "component", "freed", "requested", "where")

    def __init__(self, books: Contexts, device: str, component: str, where: Where) -> None:
        stream, pool = where
        self.component = component
        self.where = where
        self.freed, self.requested, self.completed = (
            books.context(action, device, component, 0, stream=stream, pool=pool)
            for action in (Action.FREE, Action.FREE_REQUESTED, Action.FREE_COMPLETED)
        )


class History:
    """Follows the history of one device.

    Args:
        device: as ``cuda:0``.
        layout: its blocks when the history begins; :meth:`seed` tells the books of them.
        time_zero_us: what entries call the time that events call 0.
        workspace: bytes of the workspace that is allocated for each matrix product and freed right
            after it, as from torch 2.15 on; None: it is kept.
    """

    def __init__(
        self,
        device: str,
        layout: Layout,
        books: Contexts,
        names: Names,
        time_zero_us: int,
        workspace: int | None = None,
    ) -> None:
        self.device = device
        self.layout = layout
        #: Entries that no allocator could have written after those before them, and the first.
        self.impossible = 0
        self.problem: str | None = None
        self._books = books
        self._names = names
        self._zero = time_zero_us
        self._workspace = workspace
        self._owners: dict[tuple[str, Where], _Owner] = {}
        self._births: dict[tuple[str, int, Any, int], tuple[_Owner, int]] = {}
        self._born: dict[int, tuple[int, int]] = {}  # scope and stack by context

    # -- what was there ------------------------------------------------------------------------

    def seed(self, time_us: int, component: str, scope: int) -> np.ndarray:
        """Rows that allocate every segment and block of the layout at once."""
        layout, out = self.layout, list[int]()
        for address, segment in sorted(layout.segments.items()):
            action = Action.SEGMENT_MAP if segment.expandable else Action.SEGMENT_ALLOC
            context = self._context(action, (segment.stream, segment.pool), None, scope)
            out += (time_us, address, segment.bytes, segment.bytes, context)
        for blocks in (layout.live, layout.pending):
            for address, block in sorted(blocks.items()):
                self._adopt(out, time_us, address, block, component, scope)
        for address, block in sorted(layout.pending.items()):
            out += (time_us, address, block.bytes, block.requested, block.tag.requested)
        return _rows(out)

    def _adopt(
        self, out: list[int], time_us: int, address: int, block: Block, component: str, scope: int
    ) -> None:
        where = block.tag  # until now where it lies
        block.tag = self._owner(component, where)
        context = self._context(Action.ALLOC, where, component, scope)
        out += (time_us, address, block.bytes, block.requested, context)

    # -- what happened -------------------------------------------------------------------------

    def read(self, entries: Iterable[Entry], retries: int | None = None) -> np.ndarray:
        """The rows of the next entries, (n, FIELDS) int64.

        Entries that the layout can't follow are counted in :attr:`impossible` and left out.

        Args:
            entries: oldest first.
            retries: how often the allocator tried again meanwhile, by its own counter; None: not
                known, then only those that ended in an OOM count.
        """
        out: list[int] = []
        candidates: list[tuple[int, bool]] = []  # row of a possible retry, and whether it is sure
        stacks: dict[int, int] = {}  # entries share their lists of frames, and all live until then
        freed: int | None = None  # what the entry right before asked to free
        returned = 0  # bytes that the entries right before gave back to the device
        layout, names, births, zero = self.layout, self._names, self._births, self._zero
        for entry in entries:
            action, size = entry["action"], entry["size"]
            time_us = entry.get("time_us", zero) - zero
            just_freed, freed = freed, None
            just_returned, returned = returned, 0
            try:
                if action == "alloc":
                    stack = -1
                    frames = entry.get("frames")
                    if frames:
                        stack = stacks.get(id(frames), -1)
                        if stack < 0:
                            stack = stacks[id(frames)] = names.stack(frames)
                    metadata, pool = entry.get("user_metadata", ""), entry.get("pool_id")
                    key = (metadata, entry["stream"], pool, stack)
                    found = births.get(key)
                    if found is None:
                        found = births[key] = self._birth(*key)
                    owner, context = found
                    address = entry["addr"]
                    block = layout.alloc(address, size, owner)
                    out += (time_us, address, block.bytes, size, context)
                elif action == "free_requested":
                    address = entry["addr"]
                    block = layout.free_requested(address)
                    freed = address
                    out += (time_us, freed, block.bytes, block.requested, block.tag.requested)
                elif action == "free_completed":
                    address = entry["addr"]
                    block = layout.free_completed(address)
                    if address == just_freed:
                        out[-1] = block.tag.freed  # both at once
                        if block.requested == self._workspace:
                            self._work(out, address, block)
                    else:
                        row = (block.bytes, block.requested, block.tag.completed)
                        out += (time_us, address, *row)
                elif action in RETURNED:
                    self._return(out, action, entry, time_us)
                    returned = just_returned + size
                else:
                    if just_returned and action in AFTER_RETRY:
                        candidates.append((len(out) // FIELDS, action == "oom"))
                        context = self._context(Action.RETRY, (entry["stream"], None), None, 0)
                        out += (time_us, 0, just_returned, just_returned, context)
                    self._other(out, action, entry, time_us)
            except LayoutError as error:
                self.impossible += 1
                self.problem = self.problem or str(error)
        return self._with_retries(_rows(out), candidates, retries)

    def _work(self, out: list[int], address: int, block: Block) -> None:
        """A block of a workspace's size was freed; if nothing else came between, it was one."""
        birth = len(out) - 2 * FIELDS
        if birth >= 0 and out[birth + 1] == address:
            where = block.tag.where
            out[birth + 4] = self._reborn(out[birth + 4], where, "backend")
            out[-1] = self._owner("backend", where).freed

    def _reborn(self, context: int, where: Where, component: str) -> int:
        """The context of an allocation, with another component."""
        scope, stack = self._born.get(context, (0, -1))
        return self._context(Action.ALLOC, where, component, scope, stack=stack)

    def _birth(self, metadata: str, stream: int, pool: Any, stack: int) -> tuple[_Owner, int]:
        component, scope = self._names.birth(metadata)
        where = (stream, pool_name(pool))
        context = self._context(Action.ALLOC, where, component, scope, stack=stack)
        self._born[context] = scope, stack
        return self._owner(component, where), context

    def _return(self, out: list[int], action: str, entry: Entry, time_us: int) -> None:
        address, size = entry["addr"], entry["size"]
        if action == "segment_free":
            pool = self.layout.give_back(address, size).pool
            context = self._context(Action.SEGMENT_FREE, (entry["stream"], pool), None, 0)
        else:
            self.layout.unmap(address, size)
            where = (entry["stream"], pool_name(entry.get("pool_id")))
            context = self._context(Action.SEGMENT_UNMAP, where, None, 0)
        out += (time_us, address, size, size, context)

    def _other(self, out: list[int], action: str, entry: Entry, time_us: int) -> None:
        """The actions that are rare."""
        size, stream = entry["size"], entry["stream"]
        _, scope = self._names.birth(entry.get("user_metadata", ""))
        if action in ("segment_alloc", "segment_map"):
            expandable = action == "segment_map"
            segment = Segment(size, stream, pool_name(entry.get("pool_id")), expandable)
            self.layout.take(entry["addr"], segment)
            kind = Action.SEGMENT_MAP if expandable else Action.SEGMENT_ALLOC
            context = self._context(kind, (stream, segment.pool), None, scope)
            out += (time_us, entry["addr"], size, size, context)
        elif action == "oom":
            where = (stream, pool_name(entry.get("pool_id")))
            context = self._context(Action.OOM, where, None, scope)
            out += (time_us, entry["device_free"], size, size, context)
        elif action == "annotate":
            self.retag(out, time_us, entry["addr"], entry.get("user_metadata", ""))

    def retag(self, out: list[int], time_us: int, address: int, text: str) -> None:
        """An annotation of the tensor whose block is at ``address``."""
        found = self._names.retag(text)
        block = self.layout.live.get(address)
        if found is None or block is None or not found.applies(block.tag.component):
            return
        previous, where = block.tag.component, block.tag.where
        component = found.component or previous
        block.tag = self._owner(component, where)
        if found.born:
            for row in range(len(out) - FIELDS, -1, -FIELDS):
                if out[row + 1] == address:
                    out[row + 4] = self._reborn(out[row + 4], where, component)
                    return
        context = self._context(Action.RETAG, where, component, found.scope, previous)
        out += (time_us, address, block.bytes, block.requested, context)

    def _with_retries(
        self, rows: np.ndarray, candidates: list[tuple[int, bool]], retries: int | None
    ) -> np.ndarray:
        """Keep as many of the possible retries as there were, the sure ones first."""
        count = sum(sure for _, sure in candidates) if retries is None else retries
        ordered = sorted(candidates, key=lambda one: (not one[1], -one[0]))
        keep = np.ones(len(rows), dtype=bool)
        keep[[row for row, _ in ordered[count:]]] = False
        return rows[keep]

    def forget(self) -> None:
        """Number the contexts of allocations anew from now on."""
        self._births.clear()
        self._born.clear()

    # -- what was missed -----------------------------------------------------------------------

    def resume(self, now: Layout, time_us: int, scope: int) -> np.ndarray:
        """Go on from the allocator's own state; the rows lead from ours to it.

        What isn't in both is given up and taken again: as ``other``, in ``scope``.
        """
        out: list[int] = []
        old = self.layout
        for blocks, kept in ((old.live, now.live), (old.pending, now.pending)):
            for address, block in blocks.items():
                same = kept.get(address)
                if same is not None and same.bytes == block.bytes:
                    same.tag = block.tag
                else:
                    context = block.tag.freed if blocks is old.live else block.tag.completed
                    out += (time_us, address, block.bytes, block.requested, context)
        self._resume_segments(out, old.ranges(), now.ranges(), time_us)
        for blocks in (now.live, now.pending):
            new = {a: block for a, block in blocks.items() if not isinstance(block.tag, _Owner)}
            for address, block in new.items():
                self._adopt(out, time_us, address, block, "other", scope)
                if blocks is now.pending:
                    out += (time_us, address, block.bytes, block.requested, block.tag.requested)
        self.layout = now
        return _rows(out)

    def _resume_segments(
        self, out: list[int], old: dict[int, Segment], now: dict[int, Segment], time_us: int
    ) -> None:
        for segments, others, plain, expandable in (
            (old, now, Action.SEGMENT_FREE, Action.SEGMENT_UNMAP),
            (now, old, Action.SEGMENT_ALLOC, Action.SEGMENT_MAP),
        ):
            for address, one in segments.items():
                if address not in others or others[address].bytes != one.bytes:
                    action = expandable if one.expandable else plain
                    context = self._context(action, (one.stream, one.pool), None, 0)
                    out += (time_us, address, one.bytes, one.bytes, context)

    # -- interning -----------------------------------------------------------------------------

    def _owner(self, component: str, where: Where) -> _Owner:
        key = (component, where)
        found = self._owners.get(key)
        if found is None:
            found = self._owners[key] = _Owner(self._books, self.device, component, where)
        return found

    def _context(
        self,
        action: Action,
        where: Where,
        component: str | None,
        scope: int,
        previous: str | None = None,
        stack: int = -1,
    ) -> int:
        stream, pool = where
        return self._books.context(
            action, self.device, component, scope, previous, stack, stream, pool
        )


def _rows(flat: list[int]) -> np.ndarray:
    return np.fromiter(flat, np.int64, len(flat)).reshape(-1, FIELDS)
