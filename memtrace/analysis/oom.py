"""What an out-of-memory error of a CUDA device met: who held what, and why there was no room."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.analysis.peaks import Group, top_allocations
from memtrace.analysis.places import Place, place
from memtrace.analysis.segments import layout_at
from memtrace.sizes import format_size
from memtrace.trace.schema import Action


@dataclass(frozen=True)
class Oom:
    """One out-of-memory error, in bytes; None: unknown."""

    pid: int
    device: str
    event: int
    time_us: int
    place: Place
    requested: int
    free: int  # on the device
    total: int | None  # of the device
    reserved: int
    allocated: int
    active: int  # allocated, or freed and waiting for a stream
    inactive_split: int
    largest_free_block: int  # among those that the allocator holds
    components: Mapping[str, int]
    top: tuple[Group, ...]

    @property
    def outside(self) -> int | None:
        """Used on the device, but not by this process's allocator: contexts, other processes."""
        return None if self.total is None else self.total - self.free - self.reserved

    @property
    def verdict(self) -> str:
        """Why there was no room, in one sentence or two."""
        wanted = format_size(self.requested)
        if self.total is not None and self.requested > self.total:
            return (
                f"{wanted} were asked for and {self.device} has {format_size(self.total)} in all."
            )
        cached = self.reserved - self.active
        if cached + self.free >= self.requested:
            return (
                f"{wanted} were asked for and would fit in what is free, in pieces: "
                f"{format_size(cached)} inside reserved memory, the largest block "
                f"{format_size(self.largest_free_block)}, and {format_size(self.free)} on the "
                "device. As far as this request goes that is fragmentation, which "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is made for."
            )
        outside = self.outside
        held = f"{format_size(self.allocated)} are allocated"
        if self.active > self.allocated:
            held += f", {format_size(self.active - self.allocated)} wait for another stream"
        if outside is not None:
            held += f", {format_size(outside)} are used outside the allocator"
        missing = self.requested - cached - self.free
        largest = max(self.components, key=lambda name: self.components[name])
        return (
            f"{wanted} were asked for and {format_size(missing)} are missing however memory is "
            f"arranged: {held}. The largest part is {largest} with "
            f"{format_size(self.components[largest])}."
        )


def ooms(account: Account, total: int | None) -> list[Oom]:
    """The out-of-memory errors of an account, in order; ``total``: bytes of its device."""
    contexts, events = account.process.contexts, account.process.events
    failed = account.here & (contexts["action"] == Action.OOM)
    return [_oom(account, int(event), total) for event in np.flatnonzero(failed[events["context"]])]


def _oom(account: Account, event: int, total: int | None) -> Oom:
    events = account.process.events
    layout = layout_at(account, event)
    counted = layout.totals if layout is not None else None
    scope = account.process.contexts["scope"][events["context"][event]]
    allocated = account.allocated.read_one(event)
    return Oom(
        pid=account.process.pid,
        device=account.device,
        event=event,
        time_us=int(account.time_us[event]),
        place=place(account.process, int(scope)),
        requested=int(events["bytes"][event]),
        free=int(events["id"][event]),
        total=total,
        reserved=counted.reserved if counted else allocated,
        allocated=allocated,
        active=counted.active if counted else allocated,
        inactive_split=counted.inactive_split if counted else 0,
        largest_free_block=counted.largest_free if counted else 0,
        components={name: series.read_one(event) for name, series in account.components.items()},
        top=tuple(top_allocations(account, event)),
    )
