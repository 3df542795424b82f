"""Checks of a whole account: both identities, and that frees balance allocations.

The component sums in :mod:`memtrace.analysis.accounts` are read off the events' labels. Here they
are held against three things that they were not made from: the life of each storage (a join by
id), the allocated bytes (from allocations and frees alone), and what the recorder's own list of
live storages added up to when it wrote a sample.
"""

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.analysis.process import ProcessMemory, process_terms
from memtrace.sizes import format_size
from memtrace.trace.schema import FREES, Action


@dataclass(frozen=True)
class Identities:
    """Whether the identities hold at all ``events``; ``problem`` says where the first breaks."""

    events: int
    problem: str | None

    @property
    def hold(self) -> bool:
        return self.problem is None


def check(account: Account, memory: ProcessMemory) -> Identities:
    """Check every event of an account and every sample of its process's memory."""
    problem = (
        _storages(account) or _components(account) or _samples(account) or _process(account, memory)
    )
    return Identities(len(account.process.events["id"]), problem)


def _storages(account: Account) -> str | None:
    """Each storage is allocated, perhaps retagged, freed once; and keeps its bytes and label."""
    events, order = account.process.events, account.by_storage
    if len(order) == 0:
        return None
    storage, size, context = (events[name][order] for name in ("id", "bytes", "context"))
    joins, leaves = (labels[context] for labels in account.moves)
    action = account.process.contexts["action"][context]
    alloc, free = action == Action.ALLOC, np.isin(action, FREES)

    same = np.concatenate(([False], storage[1:] == storage[:-1]))  # as the event before in order
    was_live = same & np.concatenate(([False], ~free[:-1]))
    problems = (
        (size < 0, "has a negative size"),
        (~alloc & ~was_live, "is freed or retagged while it isn't live"),
        (alloc & was_live, "is allocated while it is live"),
        (~alloc & was_live & (size != np.roll(size, 1)), "changes its size while it is live"),
        (~alloc & was_live & (leaves != np.roll(joins, 1)), "leaves a component it isn't in"),
    )
    found = [
        (int(order[broken].min()), int(storage[broken][order[broken].argmin()]), text)
        for broken, text in problems
        if broken.any()
    ]
    if not found:
        return None
    event, number, text = min(found)
    return f"storage {number} {text} at event {event}"


def _components(account: Account) -> str | None:
    """No component is ever negative, and their sum is what is allocated at every event."""
    total = np.zeros(len(account.process.events["id"]), dtype=np.int64)
    for name, series in account.components.items():
        negative = series.levels < 0
        if negative.any():
            step = int(negative.argmax())
            return f"{name} is {format_size(int(series.levels[step]))} at event " + str(
                series.at[step - 1]
            )
        total[series.at] += np.diff(series.levels)
    allocated = account.allocated
    total[allocated.at] -= np.diff(allocated.levels)
    unequal = np.cumsum(total) != 0
    if unequal.any():
        return f"the components don't sum to the allocated bytes at event {int(unequal.argmax())}"
    return None


def _samples(account: Account) -> str | None:
    """What the recorder or the allocator counted itself is what the events add up to."""
    samples = account.process.samples
    booked = {
        f"{what}:{account.device}": (what, series)
        for what, series in (
            ("allocated", account.allocated),
            ("active", account.active),
            ("reserved", account.reserved),
        )
        if series is not None
    }
    for name, event, value in zip(
        samples["source"], samples["event"], samples["value"], strict=True
    ):
        if name in booked and event is not None and value is not None:
            what, series = booked[name]
            found = series.read_one(event - 1)
            if found != value:
                return (
                    f"{format_size(found)} are booked as {what} after {event} events and "
                    f"{format_size(value)} were counted"
                )
    return None


def _process(account: Account, memory: ProcessMemory) -> str | None:
    """allocated + allocator + external = process at every sample, where all are known."""
    terms = process_terms(account, memory)
    if terms is None:
        return None
    unequal = terms.allocated + terms.allocator + terms.external != memory.value
    if unequal.any():
        return f"process memory has an unexplained rest in sample {int(unequal.argmax())}"
    if (terms.allocator < 0).any():
        return f"more is allocated than reserved in sample {int((terms.allocator < 0).argmax())}"
    return None
