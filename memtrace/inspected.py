"""One instant, or one request, of a run as text for a terminal."""

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memtrace.analysis.instants import Answered, Instant
from memtrace.analysis.peaks import Balance
from memtrace.components import LIVE_COMPONENTS, TENSOR_COMPONENTS
from memtrace.render import UNKNOWN, allocations, grid, seconds, size, swatch
from memtrace.trace.reader import Trace


def inspected_instant(trace: Trace, one: Instant, top: int) -> Group:
    """All of ``memtrace report --at``."""
    when = f"after event {one.balance.event:,}, at {seconds(one.balance.time_us)}"
    parts: list[RenderableType] = [
        Text(trace.name, style="bold"),
        Text(f"{one.account.device} {when}\n  {one.place.within}"),
        Text(),
        _balances({"": one.balance}),
    ]
    if top:
        parts += [Text(), allocations(one.top[:top], "alive")]
    return Group(*parts)


def inspected_request(trace: Trace, one: Answered, top: int) -> Group:
    """All of ``memtrace report --request``."""
    row = one.boundary
    title = f"request {row.name or row.request} on {one.served.device}: {row.outcome or UNKNOWN}"
    parts: list[RenderableType] = [
        Text(trace.name, style="bold"),
        Text(title),
        Text(),
        _listed(one),
    ]
    columns = {"at its peak": one.peak, "after it": one.after}
    known = {name: found.balance for name, found in columns.items() if found is not None}
    if known:
        parts += [Text(), _balances(known)]
    if one.peak is not None and top:
        parts += [Text(), Text(f"peak {one.peak.place.within}"), Text()]
        parts += [allocations(one.peak.top[:top])]
    return Group(*parts)


def _listed(one: Answered) -> Table:
    table = grid("", "", text=(0, 1))
    table.show_header = False
    for name, value in facts(one):
        table.add_row(name, value)
    return table


def facts(one: Answered) -> Iterator[tuple[str, str]]:
    """What is known of the request and of its device right after it, name by name."""
    row = one.boundary
    yield "prompt", _count(row.prompt_tokens, " tokens")
    speed = "" if row.tokens_per_s is None else f", then {row.tokens_per_s:.1f} a second"
    yield "generated", _count(row.generated_tokens, " tokens") + speed
    first = UNKNOWN if row.first_token_s is None else f"{row.first_token_s:.3f} s"
    yield "first token", f"{first} after it began at {seconds(row.start_us)}"
    yield "ended", seconds(row.end_us)
    yield "allocated", f"{size(row.allocated)} after it"
    yield "reserved", f"{size(row.reserved)} after it"
    yield "process", f"{size(row.process)} after it"
    if row.inactive_split is not None:
        split = size(row.inactive_split)
        yield "inactive split", f"{split} after it, largest free block {size(row.largest_free)}"
    if row.retries is not None:
        ooms, segments = _count(row.ooms), _count(row.segments)
        yield "so far", f"{row.retries:,} retries, {ooms} out of memory; {segments} segments"
    if one.difference is not None:
        yield "snapshot", f"differs from the events: {one.difference.what}"
    elif one.compared:
        yield "snapshot", "the allocator's own equals the state rebuilt from the events"
    elif row.snapshot is not None:
        yield "snapshot", f"number {row.snapshot}; no events to compare it with"


def _count(value: int | None, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:,}{unit}"


def _balances(columns: Mapping[str, Balance]) -> Table:
    """Every term of both equations, a column an instant."""
    table = grid("", *columns, text=(0,))
    found = columns.values()
    for name in LIVE_COMPONENTS:
        table.add_row(swatch(name), *(size(one.components[name]) for one in found))
    table.add_row(Text("M_live", style="bold"), *(size(one.live) for one in found))
    for name in TENSOR_COMPONENTS:
        if name not in LIVE_COMPONENTS:
            table.add_row(swatch(name), *(size(one.components[name]) for one in found))
    table.add_row(Text("allocated", style="bold"), *(size(one.allocated) for one in found))
    table.add_row(swatch("allocator"), *(size(one.allocator) for one in found))
    table.add_row(swatch("external"), *(size(one.external) for one in found))
    table.add_row(Text("process", style="bold"), *(size(one.process) for one in found))
    return table
