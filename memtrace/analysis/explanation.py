"""Why a run ran out of memory, or what its allocator held for nothing at the peak."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.accounts import Account
from memtrace.analysis.failure import Clearing, Diagnosis, Kind, clearing
from memtrace.analysis.fragmentation import Parts, fragmentation, parts
from memtrace.analysis.oom import Oom
from memtrace.analysis.places import Place, place
from memtrace.analysis.segments import layout_at
from memtrace.analysis.summary import AccountSummary, Summary, summarise
from memtrace.analysis.trials import Progress, Trials, try_settings
from memtrace.errors import MemtraceError
from memtrace.sizes import format_size
from memtrace.trace.reader import Trace
from memtrace.trace.schema import Action

#: Settings that save less than this share of what is reserved aren't worth a line.
_WORTH = 0.01


@dataclass(frozen=True)
class HardPeak:
    """The most that hard fragmentation ever took."""

    bytes: int
    time_us: int
    place: Place


@dataclass(frozen=True)
class Explanation:
    """One run.

    Attributes:
        account: of the device that failed last; without a failure, the primary one.
        oom: its last failure; None: there was none.
        event, time_us, place: of the failure, or of the peak of reserved memory.
        parts: what the reserved memory did there.
        clearing: what would have let the request in; None: not asked, or nothing.
        trials: other settings; None: not tried.
        help: what would help, in words, the cheapest first.
    """

    summary: Summary
    account: AccountSummary
    oom: Oom | None
    event: int
    time_us: int
    place: Place
    parts: Parts
    hard_peak: HardPeak | None
    clearing: Clearing | None
    trials: Trials | None
    help: tuple[str, ...]

    @property
    def words(self) -> str:
        """What happened, in some sentences."""
        if self.oom is not None:
            return self.oom.verdict
        found = self.parts
        unused = found.reserved - found.allocated
        return (
            f"Nothing failed. At its peak the allocator held {format_size(found.reserved)}, of "
            f"which {format_size(unused)} served nobody: {format_size(found.hard)} are hard "
            f"fragmentation ({100 * found.ratio:.1f} % of what is reserved), "
            f"{format_size(found.releasable)} whole free segments, which it returns when memory "
            f"is short, {format_size(found.private)} are free in private pools, and "
            f"{format_size(found.pending)} wait for a stream."
        )


def explain(
    trace: Trace, *, replay: bool = True, progress: Progress = lambda settings, left: None
) -> Explanation:
    """Explain the last failure of a run, or its peak of reserved memory.

    ``replay``: try other settings with the same requests, which takes some seconds a million.

    Raises:
        MemtraceError: the trace is damaged or inconsistent, or has no segments and no failure.
    """
    summary = summarise(trace)
    oom = summary.ooms[-1] if summary.ooms else None
    found = next(
        (one for one in summary.accounts if oom in one.ooms) if oom else iter(summary.accounts),
        None,
    )
    if oom is None and (found is None or found.account.reserved is None or found.device == "cpu"):
        raise MemtraceError(_nothing(summary, found))
    assert found is not None
    if not found.identities.hold:
        raise MemtraceError(
            f"{summary.folder} can't be explained, since it is inconsistent: "
            f"{found.identities.problem}"
        )
    account = found.account
    reserved = account.reserved
    event = oom.event if oom else _fullest(account)
    layout = oom.layout if oom else layout_at(account, event)
    held = oom.diagnosis.parts if oom else parts(layout) if layout else Parts.none()
    cleared = None
    if oom and layout and oom.kind not in (Kind.PENDING, Kind.PRIVATE):
        cleared = clearing(account, oom.request, layout)
    trials = None
    if replay and not (oom and oom.kind is Kind.PENDING) and reserved is not None:
        request = oom.request if oom else None
        trials = try_settings(trace, account, request, held.reserved, progress)
    scope = account.process.contexts["scope"][account.process.events["context"][event]]
    return Explanation(
        summary=summary,
        account=found,
        oom=oom,
        event=event,
        time_us=int(account.time_us[event]),
        place=place(account.process, int(scope)),
        parts=held,
        hard_peak=_hard_peak(account),
        clearing=cleared,
        trials=trials,
        help=tuple(_help(oom.diagnosis if oom else None, found, cleared, trials)),
    )


def _fullest(account: Account) -> int:
    """When most was allocated while reserved memory was at its peak for the first time."""
    reserved, allocated = account.reserved, account.allocated
    if reserved is None or not reserved.peak:
        return 0
    step = int(reserved.levels.argmax())
    first = int(reserved.at[step - 1])
    end = int(reserved.at[step]) if step < len(reserved.at) else len(account.time_us)
    start, stop = np.searchsorted(allocated.at, (first, end))
    if start == stop:
        return first
    return int(allocated.at[start + allocated.levels[start + 1 : stop + 1].argmax()])


def _nothing(summary: Summary, found: AccountSummary | None) -> str:
    """Why there is nothing to explain."""
    end = f"; it was {summary.death.verdict}" if summary.death else ""
    if found is None:
        return f"{summary.folder} has nothing to explain: no tensor was seen in it{end}"
    if found.device == "cpu":
        return (
            f"{summary.folder} has nothing to explain: it ran on the CPU, which has no caching "
            f"allocator{end}"
        )
    return (
        f"{summary.folder} has nothing to explain: the segments of {found.device}'s allocator "
        f"weren't recorded, and nothing ran out of memory{end}"
    )


def _hard_peak(account: Account) -> HardPeak | None:
    found = fragmentation(account)
    if found is None:
        return None
    events, contexts = account.process.events, account.process.contexts
    # What was just taken from the device is free until the block is cut from it.
    taken = np.isin(contexts["action"], (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP))
    at = found.hard.at
    levels = np.where(taken[events["context"][at]], 0, found.hard.levels[1:])
    if not levels.any():
        return None
    step = int(levels.argmax())
    event = int(at[step])
    where = place(account.process, int(contexts["scope"][events["context"][event]]))
    return HardPeak(int(levels[step]), int(account.time_us[event]), where)


# -- what would help -------------------------------------------------------------------------------


def _help(
    why: Diagnosis | None, found: AccountSummary, cleared: Clearing | None, trials: Trials | None
) -> Iterator[str]:
    """The cheapest first: asking again, a setting, a line of code, less work, another device."""
    if why is None:
        yield from _savings(trials)
        return
    if why.kind is Kind.PENDING:
        yield "Catch the error and ask again: by then the block is free."
    yield from _settings(why, trials)
    kinds = (why.kind, *why.also)
    if Kind.FRACTION in kinds:
        yield _of_fraction(why)
    if Kind.PRIVATE in kinds:
        yield from _of_private(why)
    if why.kind is Kind.PENDING:
        yield (
            "Don't give a block that another stream uses to record_stream() and free it: keep it "
            "until that stream is done, by an event."
        )
    if cleared is not None and cleared.blocks:
        yield _of_clearing(cleared)
    if why.kind is Kind.EXHAUSTED:
        yield from _of_exhaustion(why, found)


def _settings(why: Diagnosis, trials: Trials | None) -> Iterator[str]:
    if trials is None:
        if why.kind is Kind.FRAGMENTED:
            yield (
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is made for that; it wasn't "
                "replayed."
            )
        return
    if trials.distrust:
        return
    good = next((one for one in trials.others if one.avoids and not one.failures), None)
    if good is not None and good.settings is not None:
        yield (
            f"export PYTORCH_CUDA_ALLOC_CONF={good.settings}: replayed, the same requests fit, "
            f"with {format_size(good.reserved_peak)} reserved at most."
        )


def _of_fraction(why: Diagnosis) -> str:
    request = why.request
    needed = why.parts.reserved + request.wanted
    if request.total is None:
        return f"Raise the memory fraction so that it allows {format_size(needed)} at least."
    # Rounded up, so that what is printed is enough.
    share = -(-1000 * needed // request.total) / 1000
    return (
        f"torch.cuda.set_per_process_memory_fraction({share:.3f}) or more: "
        f"{format_size(needed)} of {format_size(request.total)}."
    )


def _of_private(why: Diagnosis) -> Iterator[str]:
    pools: dict[str, int] = {}
    for owner, size in why.parts.free.items():
        if owner.pool is not None:
            pools[owner.pool] = pools.get(owner.pool, 0) + size
    listed = ", ".join(f"pool {name} {format_size(size)}" for name, size in pools.items())
    held = f" ({listed})" if listed else ""
    yield (
        f"Delete CUDA graphs and MemPools that aren't used any more{held}, then "
        "torch.cuda.empty_cache()."
    )
    yield "Let graphs share one pool: torch.cuda.graph(other, pool=first.pool())."


def _of_clearing(cleared: Clearing) -> str:
    count, size = len(cleared.blocks), format_size(cleared.bytes)
    blocks = f"one block of {size}" if count == 1 else f"{count:,} blocks, {size} in all"
    return (
        f"Free earlier, or allocate elsewhere, {blocks}: the fewest live bytes that made room, "
        f"{format_size(cleared.gained)} with what is free beside them."
    )


def _of_exhaustion(why: Diagnosis, found: AccountSummary) -> Iterator[str]:
    request, held = why.request, why.parts
    if request.total is not None:
        outside = request.total - request.free - held.reserved
        context = found.context or 0
        if outside - context >= request.lack(held.reserved):
            yield (
                f"Stop what else uses the device: {format_size(outside)} are outside this "
                "process's allocator, its CUDA context among them."
            )
    missing = request.lack(held.reserved) - held.hard - held.releasable - held.private
    least = (
        ""
        if request.total is None
        else (f", or take a device of {format_size(request.total + missing)} at least")
    )
    yield f"Hold at least {format_size(missing)} less at that moment{least}."


def _savings(trials: Trials | None) -> Iterator[str]:
    if trials is None or trials.distrust:
        return
    own = trials.own.reserved_peak
    ranked = sorted(trials.others, key=lambda trial: trial.reserved_peak)
    for trial in ranked[:1]:
        if trial.settings is not None and own - trial.reserved_peak > _WORTH * own:
            yield (
                f"export PYTORCH_CUDA_ALLOC_CONF={trial.settings}: replayed, "
                f"{format_size(trial.reserved_peak)} are reserved at most instead of "
                f"{format_size(own)}."
            )
