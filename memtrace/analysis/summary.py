"""One run as a table: what ``report`` prints, ``compare`` subtracts and the viewer shows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.external import External, split
from memtrace.analysis.identities import Identities, check
from memtrace.analysis.oom import Oom, ooms
from memtrace.analysis.peaks import Balance, Group, above_steady, balance, top_allocations
from memtrace.analysis.places import Place, place
from memtrace.analysis.process import (
    ProcessMemory,
    Samples,
    beside,
    catalogued_context,
    process_memory,
    process_terms,
    samples,
)
from memtrace.analysis.sums import Sum, sums
from memtrace.trace.manifest import Knowledge, life
from memtrace.trace.reader import ProcessTrace, Trace


@dataclass(frozen=True)
class AccountSummary:
    """One device in one process. Bytes throughout; None: unknown."""

    account: Account
    memory: ProcessMemory
    peak: Balance  # at the peak of allocated
    external: External | None  # of that balance
    beside: Mapping[str, Samples]  # memory that is no term of the equations; analysis/process.py
    device_name: str | None  # None on the CPU
    device_total: int | None
    context: int | None  # what a CUDA context takes on a virtual card, by the catalogue
    reserved_peak: int | None
    place: Place  # of that event
    own_peaks: Mapping[str, int | None]  # of every component, allocator and external too
    details: Mapping[str, int]  # own peaks of KV_res/full and the like
    live_peak: int  # M_live of equation (1)
    end: Balance  # after the last event
    above_steady: int
    top: tuple[Group, ...]
    identities: Identities
    ooms: tuple[Oom, ...]

    @property
    def headroom(self) -> int | None:
        """What was left on the device at the peak of reserved, less a context that is known."""
        if self.device_total is None or self.reserved_peak is None:
            return None
        return self.device_total - (self.context or 0) - self.reserved_peak

    @property
    def pid(self) -> int:
        return self.account.process.pid

    @property
    def folder(self) -> str:
        """Of its process, in the run: names it where a process id names several."""
        return self.account.process.folder.name

    @property
    def device(self) -> str:
        return self.account.device


@dataclass(frozen=True)
class Request:
    """One request of a workload; None: not known, or it never came to that."""

    pid: int
    name: str | None
    prompt_tokens: int | None
    generated_tokens: int | None
    start_us: int | None
    first_token_us: int | None
    end_us: int | None
    outcome: str | None


@dataclass(frozen=True)
class Read:
    """Reads of a value that a virtual GPU doesn't know, at one place."""

    where: str | None  # file:line:function; None: unknown
    op: str
    count: int


@dataclass(frozen=True)
class Values:
    """What a process on virtual GPUs read of them and chose from them."""

    unknown_reads: int
    places: tuple[Read, ...]  # most frequent first
    choices: int  # tokens and the like, chosen in place of computed ones
    rule: str  # how

    @property
    def caveat(self) -> str | None:
        """Why the run may have gone another way than on a card; None: it didn't."""
        if not self.unknown_reads:
            return None
        times = "once" if self.unknown_reads == 1 else f"{self.unknown_reads:,} times"
        return f"a value that wasn't computed was read {times} (as 0), so a card may act otherwise"


@dataclass(frozen=True)
class ProcessSummary:
    """One process of a run."""

    pid: int
    folder: str  # its name in the run
    rank: int | None
    argv: tuple[str, ...]
    state: str
    reason: str | None  # why its recorder didn't start or stopped early
    torch: str | None
    events: int
    dropped: int
    unseen: tuple[str, ...]
    buffers: int | None  # the most that the recorder's own buffers took in it, in bytes
    values: Values | None  # None: not on a virtual GPU
    memory: ProcessMemory  # resident set, whatever the device of its tensors


@dataclass(frozen=True)
class Unrecorded:
    """A process of a run that was seen from outside only."""

    pid: int
    argv: tuple[str, ...]  # empty: unknown
    reason: str | None  # None: unknown
    rss_peak: int | None  # bytes


@dataclass(frozen=True)
class Death:
    """How a run was ended by a signal, or by the kernel for lack of memory."""

    signal: int | None
    name: str | None
    verdict: str
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Planned:
    """A run for a device that one doesn't have."""

    engine: str
    device: str  # of the catalogue
    allocator: str  # PYTORCH_CUDA_ALLOC_CONF
    modelled: tuple[str, ...]  # what its figures rest on
    unknown: tuple[str, ...]  # what isn't in them


@dataclass(frozen=True)
class Summary:
    """One run."""

    name: str
    folder: Path
    command: tuple[str, ...]
    knowledge: Knowledge
    state: str
    complete: bool
    exit_code: int | None
    exit_signal: int | None
    death: Death | None
    processes: tuple[ProcessSummary, ...]
    unrecorded: tuple[Unrecorded, ...]
    sums: Mapping[str, Sum]  # over all processes; empty where there is one
    accounts: tuple[AccountSummary, ...]  # in order of Account.rank
    requests: tuple[Request, ...]
    torn: Mapping[str, int]  # bytes after the last whole batch, by file
    rules: tuple[str, ...]  # files of rules that it was classified by, in order
    planned: Planned | None  # None: it wasn't

    @property
    def primary(self) -> AccountSummary | None:
        """The account that counts, see :attr:`Account.rank`. None: no tensor was seen."""
        return self.accounts[0] if self.accounts else None

    @property
    def events(self) -> int:
        return sum(process.events for process in self.processes)

    @property
    def dropped(self) -> int:
        return sum(process.dropped for process in self.processes)

    @property
    def ooms(self) -> tuple[Oom, ...]:
        """Every out-of-memory error of a device, by time."""
        found = (oom for one in self.accounts for oom in one.ooms)
        return tuple(sorted(found, key=lambda oom: oom.time_us))

    @property
    def memory(self) -> ProcessMemory | None:
        """Memory of the process of the primary account, or of the largest process."""
        if self.primary is not None:
            return self.primary.memory
        known = [process.memory for process in self.processes if process.memory.peak is not None]
        return max(known, key=lambda memory: memory.peak or 0, default=None)


def summarise(trace: Trace) -> Summary:
    """Everything that one run says.

    Raises:
        TraceError: its tables are damaged.
    """
    found = [
        _account(trace, account, process_memory(trace, process, account.device))
        for process in trace.processes
        for account in accounts(process)
    ]
    found.sort(key=lambda one: one.account.rank)
    manifest = trace.manifest
    exited = manifest.get("exit") or {}
    return Summary(
        name=trace.name,
        folder=trace.folder,
        command=tuple(manifest.get("command") or ()),
        knowledge=Knowledge(manifest.get("knowledge") or Knowledge.MEASURED),
        state=manifest.get("state") or "unknown",
        complete=trace.complete,
        exit_code=exited.get("code"),
        exit_signal=exited.get("signal"),
        death=_death(manifest.get("death")),
        processes=tuple(_process(trace, process) for process in trace.processes),
        unrecorded=tuple(_unrecorded(trace)),
        sums=sums(trace, [one.account for one in found]),
        accounts=tuple(found),
        requests=tuple(row for process in trace.processes for row in _requests(process)),
        rules=tuple(one["rules"] for one in manifest.get("classified") or ()),
        planned=_planned(manifest.get("planned")),
        torn=dict(trace.torn),  # last: it fills as tables are read
    )


def _account(trace: Trace, account: Account, memory: ProcessMemory) -> AccountSummary:
    event = account.allocated.peak_event or 0
    at_peak = balance(account, memory, event)
    others, device_total = beside(trace, account.process, account.device)
    scope = account.process.contexts["scope"][account.process.events["context"][event]]
    terms = process_terms(account, memory)
    own_peaks: dict[str, int | None] = {
        name: series.peak for name, series in account.components.items()
    }
    own_peaks["allocator"] = account.allocator_peak
    own_peaks["external"] = (
        None if terms is None or len(terms.external) == 0 else int(terms.external.max())
    )
    return AccountSummary(
        account=account,
        memory=memory,
        peak=at_peak,
        external=split(account, memory, at_peak),
        beside=others,
        device_name=account.process.cuda_device(account.device).get("name"),
        device_total=device_total,
        context=catalogued_context(trace, account.device),
        reserved_peak=None if account.reserved is None else account.reserved.peak,
        place=place(account.process, int(scope)),
        own_peaks=own_peaks,
        details={name: series.peak for name, series in account.details.items()},
        live_peak=account.live.peak,
        end=balance(account, memory, len(account.process.events["id"]) - 1),
        above_steady=above_steady(account),
        top=tuple(top_allocations(account, event)),
        identities=check(account, memory),
        ooms=tuple(ooms(account, device_total)),
    )


def _process(trace: Trace, process: ProcessTrace) -> ProcessSummary:
    manifest = process.manifest
    return ProcessSummary(
        pid=process.pid,
        folder=process.folder.name,
        rank=manifest.get("rank"),
        argv=tuple(manifest.get("argv") or ()),
        state=manifest.get("state") or "unknown",
        reason=manifest.get("reason") or manifest.get("failure"),
        torch=manifest.get("torch"),
        events=len(process.events["id"]),
        dropped=manifest.get("dropped") or 0,
        unseen=tuple(manifest.get("unseen") or ()),
        buffers=(manifest.get("recorder") or {}).get("peak_buffer_bytes"),
        values=_values(manifest.get("values")),
        memory=process_memory(trace, process),
    )


def _values(found: Mapping[str, Any] | None) -> Values | None:
    if not found:
        return None
    placeholder = found["placeholder"]
    return Values(
        unknown_reads=found["unknown_reads"],
        places=tuple(Read(one["where"], one["op"], one["count"]) for one in found["places"]),
        choices=placeholder["token choices"],
        rule=placeholder["rule"],
    )


def _unrecorded(trace: Trace) -> Iterator[Unrecorded]:
    """Those that were sampled and have no folder."""
    known = {life(one): one for one in trace.manifest.get("unrecorded") or ()}
    peaks = trace.manifest.get("process_peak") or {}
    recorded = {process.life for process in trace.processes}
    for name, sources in trace.sampled.items():
        if name is None or name in recorded:
            continue
        seen = known.get(name) or {}
        highest = samples(sources.get("rss", []) + sources.get("hwm", [])).peak
        yield Unrecorded(
            pid=int(name.partition("-")[0]),
            argv=tuple(seen.get("argv") or ()),
            reason=seen.get("reason"),
            rss_peak=peaks.get(name, highest),
        )


def _death(found: Mapping[str, Any] | None) -> Death | None:
    if not found:
        return None
    evidence = tuple(found.get("evidence") or ())
    return Death(found.get("signal"), found.get("name"), found.get("verdict") or "", evidence)


def _planned(found: Mapping[str, Any] | None) -> Planned | None:
    if not found:
        return None
    modelled, unknown = (tuple(found.get(name) or ()) for name in ("modelled", "unknown"))
    named = {name: found.get(name) or "" for name in ("engine", "device", "allocator")}
    return Planned(**named, modelled=modelled, unknown=unknown)


def _requests(process: ProcessTrace) -> list[Request]:
    # As Python's own numbers, which JSON knows.
    columns = [np.asarray(column).tolist() for column in process.requests.values()]
    return [Request(process.pid, *row) for row in zip(*columns, strict=True)]
