"""One run as a table: what ``report`` prints, ``compare`` subtracts and the viewer shows."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.identities import Identities, check
from memtrace.analysis.peaks import Balance, Group, above_steady, balance, top_allocations
from memtrace.analysis.places import Place, place
from memtrace.analysis.process import ProcessMemory, process_memory, process_terms
from memtrace.trace.manifest import Knowledge
from memtrace.trace.reader import ProcessTrace, Trace


@dataclass(frozen=True)
class AccountSummary:
    """One device in one process. Bytes throughout; None: unknown."""

    account: Account
    memory: ProcessMemory
    peak: Balance  # at the peak of allocated
    place: Place  # of that event
    own_peaks: Mapping[str, int | None]  # of every component, allocator and external too
    details: Mapping[str, int]  # own peaks of KV_res/full and the like
    live_peak: int  # M_live of equation (1)
    end: Balance  # after the last event
    above_steady: int
    top: tuple[Group, ...]
    identities: Identities

    @property
    def pid(self) -> int:
        return self.account.process.pid

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
class ProcessSummary:
    """One process of a run."""

    pid: int
    argv: tuple[str, ...]
    state: str
    reason: str | None  # why its recorder didn't start or stopped early
    torch: str | None
    events: int
    dropped: int
    unseen: tuple[str, ...]
    buffers: int | None  # the most that the recorder's own buffers took in it, in bytes
    memory: ProcessMemory  # resident set, whatever the device of its tensors


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
    processes: tuple[ProcessSummary, ...]
    accounts: tuple[AccountSummary, ...]  # in order of Account.rank
    requests: tuple[Request, ...]
    torn: Mapping[str, int]  # bytes after the last whole batch, by file

    @property
    def primary(self) -> AccountSummary | None:
        """The account that counts: of the largest allocated peak. None: no tensor was seen."""
        return self.accounts[0] if self.accounts else None

    @property
    def events(self) -> int:
        return sum(process.events for process in self.processes)

    @property
    def dropped(self) -> int:
        return sum(process.dropped for process in self.processes)

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
        _account(account, process_memory(trace, process, account.device))
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
        processes=tuple(_process(trace, process) for process in trace.processes),
        accounts=tuple(found),
        requests=tuple(row for process in trace.processes for row in _requests(process)),
        torn=dict(trace.torn),  # last: it fills as tables are read
    )


def _account(account: Account, memory: ProcessMemory) -> AccountSummary:
    event = account.allocated.peak_event or 0
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
        peak=balance(account, memory, event),
        place=place(account.process, int(scope)),
        own_peaks=own_peaks,
        details={name: series.peak for name, series in account.details.items()},
        live_peak=account.live.peak,
        end=balance(account, memory, len(account.process.events["id"]) - 1),
        above_steady=above_steady(account),
        top=tuple(top_allocations(account, event)),
        identities=check(account, memory),
    )


def _process(trace: Trace, process: ProcessTrace) -> ProcessSummary:
    manifest = process.manifest
    return ProcessSummary(
        pid=process.pid,
        argv=tuple(manifest.get("argv") or ()),
        state=manifest.get("state") or "unknown",
        reason=manifest.get("reason") or manifest.get("failure"),
        torch=manifest.get("torch"),
        events=len(process.events["id"]),
        dropped=manifest.get("dropped") or 0,
        unseen=tuple(manifest.get("unseen") or ()),
        buffers=(manifest.get("recorder") or {}).get("peak_buffer_bytes"),
        memory=process_memory(trace, process),
    )


def _requests(process: ProcessTrace) -> list[Request]:
    # As Python's own numbers, which JSON knows.
    columns = [np.asarray(column).tolist() for column in process.requests.values()]
    return [Request(process.pid, *row) for row in zip(*columns, strict=True)]
