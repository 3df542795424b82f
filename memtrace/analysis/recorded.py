"""What a run says of the allocator that it had: where a replay starts from."""

from dataclasses import replace

import numpy as np

from memtrace.allocator.requests import Requests, fraction_of, requests_of, settings_of, version_of
from memtrace.allocator.settings import NEWEST
from memtrace.allocator.simulation import ENDLESS, Setup
from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.process import catalogued_context, virtual_card
from memtrace.errors import MemtraceError
from memtrace.trace.reader import ProcessTrace, Trace
from memtrace.trace.schema import Action


def replayable(trace: Trace) -> list[Requests]:
    """The requests of every GPU of every process, or of the host where there is no GPU.

    The one with the largest peak comes first, on a GPU if there is any, then those of its process.

    Raises:
        MemtraceError: nothing was allocated.
        TraceError: the trace is damaged.
    """
    of_processes = [own for process in trace.processes if (own := accounts(process))]
    if not of_processes:
        raise MemtraceError(f"{trace.folder} has no allocations to replay")
    found: list[Requests] = []
    for own in sorted(of_processes, key=lambda own: own[0].rank):
        gpus = [one for one in own if one.device.startswith("cuda")]
        found += [requests_of(one.process, one.device) for one in gpus or own[:1]]
    return found


def setup_of(trace: Trace, process: ProcessTrace, device: str) -> Setup:
    """The allocator and the device of a recording, as far as it tells."""
    settings = settings_of(process)
    card = virtual_card(trace, device)
    setup = Setup(settings, version_of(process) or NEWEST, pool=card.get("pool"))
    found = process.cuda_device(device)
    if found.get("total_memory"):
        setup = replace(setup, total=found["total_memory"], fraction=fraction_of(found))
    if setup.total == ENDLESS:  # its allocator wasn't recorded
        setup = replace(setup, total=card.get("total", ENDLESS))
    if setup.total != ENDLESS:
        setup = replace(setup, outside=_outside(trace, Account(process, device), setup.total))
    return setup


def _outside(trace: Trace, account: Account, total: int) -> int:
    """What others used of the device: known where memory ran out, else a virtual card's context."""
    events = account.process.events
    failed = account.here & (account.process.contexts["action"] == Action.OOM)
    rows = np.flatnonzero(failed[events["context"]])
    reserved = account.reserved
    if len(rows) and reserved is not None:
        # "id" of a failure is what the device had free.
        return int(max(total - events["id"][rows[0]] - reserved.read_one(int(rows[0])), 0))
    return catalogued_context(trace, account.device) or 0
