"""Segments and blocks at any event, held against a plain byte map of the same events."""

import random
from pathlib import Path

import numpy as np
import pytest

from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.segments import Layout, layout_at
from memtrace.interchange.importer import import_snapshot
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import Action, State
from tests.interchange.snapshots import DATA
from tests.synthetic import History, prefill

PAGE = 512
CUDA = "cuda:0"


class ByteMap:
    """What each page of a small address space is, event by event; the slow and obvious way."""

    def __init__(self) -> None:
        self.segment: dict[int, tuple[int, bool]] = {}  # page → id of its cudaMalloc, expandable
        self.blocks: dict[int, tuple[int, int, bool]] = {}  # address → bytes, requested, pending

    def apply(self, action: int, address: int, size: int, requested: int) -> None:
        pages = range(address // PAGE, (address + size) // PAGE)
        if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            for page in pages:
                expandable = action == Action.SEGMENT_MAP
                self.segment[page] = (0 if expandable else address, expandable)
        elif action in (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP):
            for page in pages:
                del self.segment[page]
        elif action == Action.ALLOC:
            self.blocks[address] = size, requested, False
        elif action == Action.FREE_REQUESTED:
            self.blocks[address] = size, requested, True
        elif action in (Action.FREE, Action.FREE_COMPLETED):
            del self.blocks[address]

    def runs(self) -> list[tuple[list[int], bool]]:
        """Segments as (their pages, expandable)."""
        found: list[tuple[list[int], bool]] = []
        for page in sorted(self.segment):
            owner = self.segment[page]
            if found and found[-1][0][-1] == page - 1 and self.segment[page - 1] == owner:
                found[-1][0].append(page)
            else:
                found.append(([page], owner[1]))
        return found

    def totals(self) -> dict[str, int]:
        used = {
            page
            for address, (size, _, _) in self.blocks.items()
            for page in range(address // PAGE, (address + size) // PAGE)
        }
        gaps: list[tuple[int, bool, bool]] = []  # bytes, whole segment, expandable
        for pages, expandable in self.runs():
            length = 0
            for page in [*pages, -1]:
                if page in used or page == -1:
                    if length:
                        gaps.append((length * PAGE, length == len(pages), expandable))
                    length = 0
                else:
                    length += 1
        split = [size for size, whole, expandable in gaps if not whole and not expandable]
        return {
            "reserved": len(self.segment) * PAGE,
            "allocated": sum(size for size, _, pending in self.blocks.values() if not pending),
            "active": sum(size for size, _, _ in self.blocks.values()),
            "requested": sum(requested for _, requested, _ in self.blocks.values()),
            "slack": sum(
                size - requested for size, requested, pending in self.blocks.values() if not pending
            ),
            "free": sum(size for size, _, _ in gaps),
            "largest_free": max((size for size, _, _ in gaps), default=0),
            "free_segments": sum(size for size, whole, _ in gaps if whole),
            "inactive_split": sum(split),
            "inactive_split_blocks": len(split),
            "segments": len(self.runs()),
            "blocks": len(self.blocks),
        }


def assert_equal_at_every_event(account: Account) -> None:
    process, plain = account.process, ByteMap()
    names = ("id", "bytes", "requested", "context")
    columns = (process.events[name].tolist() for name in names)
    for event, (address, size, requested, context) in enumerate(zip(*columns, strict=True)):
        if process.contexts["device"][context] == account.device:
            plain.apply(process.contexts["action"][context], address, size, requested)
        layout = layout_at(account, event)
        if layout is None:
            assert not plain.segment
            continue
        assert vars(layout.totals) == plain.totals()
        assert_whole(layout)


def assert_whole(layout: Layout) -> None:
    """The blocks of a segment fill it, and no two free ones are neighbours."""
    segments, blocks = layout.segments, layout.blocks
    for row in range(len(segments.address)):
        inside = np.flatnonzero(blocks.segment == row)
        ends = blocks.address[inside] + blocks.bytes[inside]
        assert blocks.address[inside[0]] == segments.address[row]
        assert ends[-1] == segments.address[row] + segments.bytes[row]
        assert (ends[:-1] == blocks.address[inside[1:]]).all()
        free = blocks.state[inside] == State.FREE
        assert not (free[1:] & free[:-1]).any()


class Allocator:
    """Random but possible events of an allocator, on two devices."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.history = History()
        self.free: dict[str, list[tuple[int, int]]] = {CUDA: [], "cuda:1": []}  # start, end
        self.live: dict[int, tuple[str, int]] = {}
        self.pending: dict[int, tuple[str, int]] = {}
        self.next = 1 << 20

    def event(self, device: str, action: Action, address: int, size: int) -> None:
        self.history.event(action, address, size, "Act", device=device)

    def step(self) -> None:
        draw, device = self.draw, self.draw.choice([CUDA, CUDA, "cuda:1"])
        kind = draw.randrange(10)
        if kind < 2:
            size = draw.randrange(1, 9) * 2 * PAGE
            self.next += draw.choice([0, 0, 8 * PAGE])
            action = draw.choice([Action.SEGMENT_ALLOC, Action.SEGMENT_MAP])
            self.event(device, action, self.next, size)
            self.free[device].append((self.next, self.next + size))
            self.next += size
        elif kind < 6 and self.free[device]:
            start, end = draw.choice(self.free[device])
            size = draw.randrange(1, (end - start) // PAGE + 1) * PAGE
            self.free[device].remove((start, end))
            if start + size < end:
                self.free[device].append((start + size, end))
            self.event(device, Action.ALLOC, start, size)
            self.live[start] = device, size
        elif kind < 8 and self.live:
            address = draw.choice(list(self.live))
            owner, size = self.live.pop(address)
            if draw.random() < 0.3:
                self.event(owner, Action.FREE_REQUESTED, address, size)
                self.pending[address] = owner, size
            else:
                self.event(owner, Action.FREE, address, size)
                self.free[owner].append((address, address + size))
        elif kind == 8 and self.pending:
            address = draw.choice(list(self.pending))
            owner, size = self.pending.pop(address)
            self.event(owner, Action.FREE_COMPLETED, address, size)
            self.free[owner].append((address, address + size))
        elif self.live:
            address = draw.choice(list(self.live))
            owner, size = self.live[address]
            self.history.event(Action.RETAG, address, size, "Act", "Act", owner)


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_are_as_a_byte_map_has_them(tmp_path: Path, seed: int) -> None:
    allocator = Allocator(seed)
    for _ in range(150):
        allocator.step()
    allocator.history.write(tmp_path / "run")
    (process,) = open_trace(tmp_path / "run").processes
    for account in accounts(process):
        assert_equal_at_every_event(account)


def test_pytorchs_own_history_is_as_a_byte_map_has_it(tmp_path: Path) -> None:
    import_snapshot(DATA / "rich_oom_torch2.13.0.pickle", tmp_path / "run")
    (process,) = open_trace(tmp_path / "run").processes
    (account,) = accounts(process)
    events = len(process.events["id"])
    for event in range(events):
        assert_whole(layout_at(account, event) or pytest.fail("no segments"))
    # The byte map takes long over 450 MiB, so only at the end.
    plain = ByteMap()
    for row in range(events):
        context = process.events["context"][row]
        numbers = (int(process.events[name][row]) for name in ("id", "bytes", "requested"))
        plain.apply(int(process.contexts["action"][context]), *numbers)
    layout = layout_at(account, events - 1)
    assert layout is not None and vars(layout.totals) == plain.totals()


def test_parts_of_a_layout_sum_to_it(tmp_path: Path) -> None:
    import_snapshot(DATA / "rich_oom_torch2.15.0.pickle", tmp_path / "run")
    (process,) = open_trace(tmp_path / "run").processes
    account = next(one for one in accounts(process) if one.device == CUDA)
    layout = layout_at(account, len(process.events["id"]) - 1)
    assert layout is not None
    by_pool, by_private = layout.by_pool(), layout.by_private_pool()
    assert set(by_pool) == {True, False} and set(by_private) == {None, "0.1"}
    for parts in (by_pool, by_private, layout.by_stream()):
        for name in ("reserved", "allocated", "free", "inactive_split", "slack", "blocks"):
            whole = getattr(layout.totals, name)
            assert sum(getattr(part.totals, name) for part in parts.values()) == whole
    assert by_pool[True].segments.bytes.tolist() == [2 << 20] * by_pool[True].totals.segments


def test_a_block_says_what_it_is_and_where_it_was_made(tmp_path: Path) -> None:
    history = History()
    history.event(Action.SEGMENT_ALLOC, 4096, 8192, None, device=CUDA)
    with history.scope("phase", "prefill"):
        history.event(Action.ALLOC, 4096, 1024, "Act", device=CUDA)
    with history.scope("phase", "score"):
        history.event(Action.RETAG, 4096, 1024, "KV_res/full", "Act", CUDA)
        history.event(Action.ALLOC, 8192, 512, "Temp", device=CUDA)
    history.event(Action.FREE_REQUESTED, 8192, 512, "Temp", device=CUDA)
    history.write(tmp_path / "run")
    (process,) = open_trace(tmp_path / "run").processes
    (account,) = accounts(process)
    layout = layout_at(account, 4)
    assert layout is not None
    blocks = layout.blocks
    assert blocks.component == ("KV_res/full", None, "Temp", None)
    assert blocks.state.tolist() == [State.ALLOCATED, State.FREE, State.PENDING, State.FREE]
    names = [process.scopes["name"][scope] for scope in blocks.scope]
    assert (names[0], names[2]) == ("prefill", "score")
    assert blocks.scope.tolist()[1::2] == [-1, -1]


def test_without_segments_nothing_is_known(tmp_path: Path) -> None:
    prefill().write(tmp_path / "run")
    (process,) = open_trace(tmp_path / "run").processes
    (account,) = accounts(process)
    assert layout_at(account, len(process.events["id"]) - 1) is None
