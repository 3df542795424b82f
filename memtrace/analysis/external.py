"""What lies in a process beside the allocator's memory, split by when it came.

``external`` can't be looked into from outside: a CUDA context, libraries, kernels that are loaded
as they are first used, NCCL, page tables. But what was there before the first tensor is its base,
and what came later is growth.
"""

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.analysis.peaks import Balance
from memtrace.analysis.process import ProcessMemory, process_terms


@dataclass(frozen=True)
class External:
    """``external`` of a balance in three parts that sum to it exactly, in bytes."""

    #: The last reading while the allocator held nothing (on CUDA the context), or the first one
    #: less what it held then.
    base: int
    #: What the nearest sample is above that.
    growth: int
    #: What the allocator took (below 0: returned) between the nearest sample and the event, the
    #: other way round: no reading of the process was taken at the event itself.
    residual: int
    #: From that sample to the event.
    apart_us: int


def split(account: Account, memory: ProcessMemory, balance: Balance) -> External | None:
    """The parts of ``balance.external``; None where that is unknown."""
    terms = process_terms(account, memory)
    nearest = memory.nearest(balance.time_us)
    if terms is None or nearest is None or balance.external is None or account.reserved is None:
        return None
    begun = account.reserved.at[:1]
    first_us = account.time_us[begun[0]] if len(begun) else np.inf
    before = np.flatnonzero(memory.time_us < first_us)
    base = int(terms.external[before[-1] if len(before) else 0])
    then = int(terms.external[nearest])
    return External(
        base=base,
        growth=then - base,
        residual=balance.external - then,
        apart_us=balance.time_us - int(memory.time_us[nearest]),
    )
