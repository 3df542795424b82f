"""What an out-of-memory error of a CUDA device met: who held what, and why there was no room."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memtrace.allocator.requests import settings_of
from memtrace.analysis.accounts import Account
from memtrace.analysis.failure import Diagnosis, Kind, Request, diagnose
from memtrace.analysis.peaks import Group, top_allocations
from memtrace.analysis.places import Place, place
from memtrace.analysis.process import cuda_device
from memtrace.analysis.segments import layout_at
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
    diagnosis: Diagnosis

    @property
    def outside(self) -> int | None:
        """Used on the device, but not by this process's allocator: contexts, other processes."""
        return None if self.total is None else self.total - self.free - self.reserved

    @property
    def kind(self) -> Kind:
        """Why there was no room."""
        return self.diagnosis.kind

    @property
    def verdict(self) -> str:
        """The same in one sentence or two."""
        return self.diagnosis.words


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
    settings = settings_of(account.process)
    fraction = cuda_device(account.process, account.device).get("memory_fraction")
    request = Request.at(
        account, event, settings, total, settings.fraction if fraction is None else fraction
    )
    return Oom(
        pid=account.process.pid,
        device=account.device,
        event=event,
        time_us=int(account.time_us[event]),
        place=place(account.process, int(scope)),
        requested=request.bytes,
        free=request.free,
        total=total,
        reserved=counted.reserved if counted else allocated,
        allocated=allocated,
        active=counted.active if counted else allocated,
        inactive_split=counted.inactive_split if counted else 0,
        largest_free_block=counted.largest_free if counted else 0,
        components={name: series.read_one(event) for name, series in account.components.items()},
        top=tuple(top_allocations(account, event)),
        diagnosis=diagnose(account, request, layout),
    )
