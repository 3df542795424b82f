"""Verdicts on persistent processes as text for a terminal."""

from collections.abc import Iterator, Sequence
from math import isfinite

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memtrace.analysis.growth import Growing
from memtrace.analysis.persistence import MEASURES, Measure, Persistence
from memtrace.analysis.stability import FEWEST, Stability
from memtrace.components import COLOURS
from memtrace.render import UNKNOWN, grid, size
from memtrace.sizes import format_size
from memtrace.trace.reader import Trace


def steadiness(trace: Trace, found: Sequence[Persistence], top: int) -> Group:
    """All of ``memtrace stability``."""
    parts: list[RenderableType] = [Text(trace.name, style="bold")]
    for one in found:
        process = f"process {one.served.process.pid}, " if len(found) > 1 else ""
        parts += [
            Text(f"{process}{one.served.device} · {counted(one)}"),
            Text(),
            _measures(one),
            Text(),
        ]
        if told := [Text(line) for line in counters(one)]:
            parts += [*told, Text()]
        parts.append(Text(verdict(one), style="bold"))
        if one.growing and top:
            parts += [Text(), _growing(one.growing, top)]
    return Group(*parts)


def counted(one: Persistence) -> str:
    """Which requests are judged."""
    rows = one.served.boundaries
    lengths = sorted({row.prompt_tokens for row in rows if row.prompt_tokens is not None})
    mix = ""
    if lengths:
        spread = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
        several = f" ({len(lengths)} lengths)" if len(lengths) > 1 else ""
        mix = f" of {spread} tokens{several}"
    failed = len(rows) - one.answered
    missed = f", {failed:,} failed" if failed else ""
    like = ", each length by itself" if one.grouped and len(lengths) > 1 else ""
    number = "1 request" if len(rows) == 1 else f"{len(rows):,} requests"
    return (
        f"{number}{mix}, {one.answered:,} answered{missed} · "
        f"warm-up {one.warmup:,}, {len(one.counted):,} count{like}"
    )


def verdict(one: Persistence) -> str:
    """The verdict in a sentence."""
    limit = rate(one.limit)
    if one.verdict is Stability.PLATEAU:
        known = " and ".join(measure.name for measure in one.judged)
        return f"plateau: {known} grow by less than {limit}{_beside(one)}"
    cause = one.cause
    if cause is not None:
        late = f" over the last {len(one.counted) - cause.since:,}" if cause.since else ""
        what = f"growing: {cause.name} by {rate(cause.slope.value)}{late}, {limit} allowed"
        if cause.name == "process" and len(one.judged) > 1:
            return f"{what}; the allocator's memory doesn't, so it is external"
        if cause.name == "allocated" and one.growing:
            return f"{what}; first of all {_named(one.growing[0])}"
        return what
    if not one.judged and len(one.counted) >= FEWEST:
        return "undecided: what is allocated or reserved isn't known; --rss judges the resident set"
    more = one.wanting
    decide = "no number of requests would decide" if more is None else f"{more:,} more might decide"
    loose = [m.name for m in one.judged if m.verdict is Stability.UNDECIDED]
    whether = " or ".join(loose) or "memory"
    return f"undecided whether {whether} grows by more than {limit}; {decide}"


def _beside(one: Persistence) -> str:
    """What grows and isn't judged."""
    grows = (m for m in one.measures if m not in one.judged and m.verdict is Stability.GROWING)
    return "".join(
        f"; the resident set, which isn't judged without --rss, by {rate(m.slope.value)}"
        for m in grows
    )


def _named(one: Growing) -> str:
    component = "" if one.component is None else f"{one.component}, "
    line = f" ({one.stack[0]})" if one.stack else ""
    return f"{component}{one.where}{line}"


def rate(value: float) -> str:
    """Bytes a request as text."""
    return f"{format_size(round(value))}/request" if isfinite(value) else UNKNOWN


def _measures(one: Persistence) -> Table:
    table = grid("", "a request", "at least", "at most", "first to last cycle", "", text=(0, 5))
    known = {measure.name: measure for measure in one.measures}
    for name in MEASURES:
        measure = known.get(name)
        table.add_row(name, *([UNKNOWN] if measure is None else measured(measure)))
    return table


def measured(one: Measure) -> Iterator[str]:
    """The slope, its interval, the change and the verdict."""
    for value in (one.slope.value, one.slope.low, one.slope.high):
        yield format_size(round(value)) if isfinite(value) else UNKNOWN
    yield format_size(one.change, signed=True)
    yield str(one.verdict)


def counters(one: Persistence) -> Iterator[str]:
    """What the allocator counts itself, where there is one that caches."""
    last = one.counted[-1] if one.counted else None
    if last is None or (last.inactive_split is None and last.retries is None):
        return
    peak = size(last.inactive_split_peak)
    yield (
        f"inactive split: {size(one.highest('inactive_split'))} at most after a request, {peak} at "
        f"most at any time; largest free block then {size(last.largest_free)}"
    )
    retries, ooms = one.gained("retries"), one.gained("ooms")
    yield (
        f"retries: {_count(retries)} since the warm-up, {_count(last.retries)} in all; out of "
        f"memory: {_count(ooms)}; segments: {_count(last.segments)}"
    )


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _growing(rows: Sequence[Growing], top: int) -> Table:
    table = grid("grows", "a request", "first", "last", "count", "made in", text=(0, 5))
    for one in rows[:top]:
        name = one.component or "not recorded"
        colour = COLOURS.get(name.partition("/")[0])
        label = Text(name) if colour is None else Text.assemble(("■ ", colour), name)
        made = Text("\n").join([Text(one.where), *(Text(f"  {line}") for line in one.stack)])
        table.add_row(
            label,
            format_size(round(one.slope.value)),
            format_size(one.first),
            format_size(one.last),
            f"{one.count:,}",
            made,
        )
    if len(rows) > top:
        table.add_row(f"and {len(rows) - top:,} more")
    return table
