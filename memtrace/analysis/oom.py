"""What an out-of-memory error of a CUDA device met: who held what, and why there was no room."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memtrace.allocator.requests import settings_of
from memtrace.analysis.accounts import Account
from memtrace.analysis.failure import Diagnosis, Kind, Request, diagnose
from memtrace.analysis.peaks import Group, top_allocations
from memtrace.analysis.places import Place, place
from memtrace.analysis.segments import Layout, Totals, layout_at
from memtrace.trace.schema import Action


@dataclass(frozen=True)
class Oom:
    """One out-of-memory error, in bytes; None: unknown.

    A program may catch thousands of them, so each is looked into when it is asked.
    """

    account: Account
    event: int
    total: int | None  # of the device

    @property
    def pid(self) -> int:
        return self.account.process.pid

    @property
    def device(self) -> str:
        return self.account.device

    @property
    def time_us(self) -> int:
        return int(self.account.time_us[self.event])

    @property
    def place(self) -> Place:
        process = self.account.process
        return place(process, int(process.contexts["scope"][process.events["context"][self.event]]))

    @cached_property
    def request(self) -> Request:
        """What was asked for, of whom."""
        process = self.account.process
        settings = settings_of(process)
        fraction = process.cuda_device(self.device).get("memory_fraction")
        if fraction is None:
            fraction = settings.fraction
        return Request.at(self.account, self.event, settings, self.total, fraction)

    @property
    def requested(self) -> int:
        return self.request.bytes

    @property
    def free(self) -> int:
        """On the device."""
        return self.request.free

    @cached_property
    def layout(self) -> Layout | None:
        """The segments and blocks that the error left."""
        return layout_at(self.account, self.event)

    @property
    def reserved(self) -> int:
        return self._totals.reserved if self._totals else self.allocated

    @property
    def allocated(self) -> int:
        return self.account.allocated.read_one(self.event)

    @property
    def active(self) -> int:
        """Allocated, or freed and waiting for a stream."""
        return self._totals.active if self._totals else self.allocated

    @property
    def inactive_split(self) -> int:
        return self._totals.inactive_split if self._totals else 0

    @property
    def largest_free_block(self) -> int:
        """Among those that the allocator holds."""
        return self._totals.largest_free if self._totals else 0

    @property
    def outside(self) -> int | None:
        """Used on the device, but not by this process's allocator: contexts, other processes."""
        return None if self.total is None else self.total - self.free - self.reserved

    @property
    def components(self) -> Mapping[str, int]:
        return {
            name: series.read_one(self.event) for name, series in self.account.components.items()
        }

    @cached_property
    def top(self) -> tuple[Group, ...]:
        """What was live, the largest groups first."""
        return tuple(top_allocations(self.account, self.event))

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """Why there was no room."""
        return diagnose(self.account, self.request, self.layout)

    @property
    def kind(self) -> Kind:
        return self.diagnosis.kind

    @property
    def verdict(self) -> str:
        """The same in one sentence or two."""
        return self.diagnosis.words

    @cached_property
    def _totals(self) -> Totals | None:
        return None if self.layout is None else self.layout.totals


def ooms(account: Account, total: int | None) -> list[Oom]:
    """The out-of-memory errors of an account, in order; ``total``: bytes of its device."""
    contexts, events = account.process.contexts, account.process.events
    failed = account.here & (contexts["action"] == Action.OOM)
    rows = np.flatnonzero(failed[events["context"]])
    return [Oom(account, event, total) for event in rows.tolist()]
