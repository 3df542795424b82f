"""Explanations of out-of-memory errors as text for a terminal."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memtrace.analysis.explanation import Explanation
from memtrace.analysis.failure import Clearing, Obstacle
from memtrace.analysis.trials import Trial, Trials
from memtrace.components import COLOURS
from memtrace.interchange.oom_message import OomMessage, Rounded, conclude, notes, remedies
from memtrace.render import allocations, grid, seconds, size, swatch
from memtrace.sizes import format_size

#: Settings that are listed.
_SHOWN = 5


def explanation(found: Explanation, top: int) -> Group:
    """All of ``memtrace explain RUN``."""
    oom = found.oom
    parts: list[RenderableType] = [Text(found.summary.name, style="bold"), Text()]
    if oom is None:
        title = f"no failure; {found.account.device} reserved most at {seconds(found.time_us)}"
    else:
        failed = len(found.summary.ooms)
        last = "" if failed == 1 else f", the last of {failed:,} failures"
        title = (
            f"out of memory asking for {format_size(oom.requested)} on {oom.device} at "
            f"{seconds(found.time_us)}{last}"
        )
    parts += [Text(title, style="bold"), Text(f"  {found.place.within}"), Text()]
    if oom is not None:
        parts.append(_verdict(str(oom.kind), oom.diagnosis.sure, map(str, oom.diagnosis.also)))
    parts += [Text(found.words), Text(), _indented(_memory(found))]
    if len(found.parts.free) > 1:
        parts += [Text(), _indented(_free(found))]
    if oom is not None and top:
        parts += [Text(), allocations(oom.top[:top])]
    if found.clearing is not None and found.clearing.blocks and top:
        parts += [Text(), _obstacles(found.clearing, top)]
    if found.trials is not None:
        parts += [Text(), *_settings(found.trials)]
    if found.help:
        parts += [Text(), *_help(found.help)]
    return Group(*parts)


def _verdict(kind: str, sure: bool, also: Iterable[str] = ()) -> Text:
    text = Text.assemble((kind, "bold"), "" if sure else " (not certain)")
    others = ", ".join(also)
    return text.append(f"; enough for it, too: {others}") if others else text


def _memory(found: Explanation) -> Table:
    """The device by what its memory does, from the whole to the parts."""
    table = grid("", "", "", text=(0, 2))
    table.show_header = False
    parts, oom, peak = found.parts, found.oom, found.hard_peak
    ratio = f"{100 * parts.ratio:.1f} % of reserved"

    def row(name: str | Text, value: int | None, note: str = "") -> None:
        table.add_row(name, size(value), Text(note, style="dim"))

    if oom is not None:
        row("device", oom.total)
        row("free on it", oom.free)
        row("outside the allocator", oom.outside, "contexts, libraries, other processes")
        if oom.request.allowed is not None:
            row("allowed", oom.request.allowed, "by the memory fraction")
    row("reserved", parts.reserved)
    row("  allocated", parts.allocated, f"{format_size(parts.slack)} beyond what was asked for")
    for name, series in found.account.account.components.items():
        held = series.read_one(found.event)
        if held:
            row(Text("    ").append_text(swatch(name)), held)
    row("  pending", parts.pending, "freed, waiting for a stream")
    row("  hard fragmentation", parts.hard, f"free between live blocks, {ratio}")
    if peak is not None and peak.bytes > parts.hard:
        row("    at its worst", peak.bytes, f"at {seconds(peak.time_us)} {peak.place.within}")
    row("  releasable", parts.releasable, "whole segments: empty_cache()")
    row("  private", parts.private, "free in pools of graphs and MemPools")
    return table


def _free(found: Explanation) -> Table:
    table = grid("free", "bytes", "largest block", text=(0,))
    for owner, held in sorted(found.parts.free.items(), key=lambda one: -one[1]):
        pool = "default pool" if owner.pool is None else f"private pool {owner.pool}"
        largest = format_size(found.parts.largest[owner])
        table.add_row(f"{pool}, stream {owner.stream:#x}", format_size(held), largest)
    return table


def _obstacles(clearing: Clearing, top: int) -> Table:
    """The blocks in the way, those that are alike in one row."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[Obstacle]] = {}
    for block in clearing.blocks:
        key = block.component, str(block.place.folded()), block.stack
        groups.setdefault(key, []).append(block)
    ranked = sorted(groups.items(), key=lambda one: -sum(block.bytes for block in one[1]))
    table = grid("live in the way", "bytes", "count", "age", "made in", text=(0, 4))
    for (component, where, stack), blocks in ranked[:top]:
        label = Text.assemble(("■ ", COLOURS[component.partition("/")[0]]), component)
        held = format_size(sum(block.bytes for block in blocks))
        made = Text("\n").join([Text(where), *(Text(f"  {frame}") for frame in stack)])
        table.add_row(label, held, f"{len(blocks):,}", _ages(blocks), made)
    return table


def _ages(blocks: Sequence[Obstacle]) -> str:
    youngest, oldest = (pick(block.age_us for block in blocks) for pick in (min, max))
    if youngest == oldest:
        return seconds(oldest)
    return f"{youngest / 1e6:.3f}-{seconds(oldest)}"


def _settings(trials: Trials) -> Iterator[RenderableType]:
    asked = trials.own.avoids is not None
    headers = (
        "settings, replayed",
        *(["request"] if asked else []),
        "failures",
        "reserved at most",
    )
    table = grid(*headers, text=(0, 1) if asked else (0,))

    def row(name: str, trial: Trial) -> None:
        fits = ["succeeds" if trial.avoids else "fails"] if asked else []
        table.add_row(name, *fits, f"{trial.failures:,}", format_size(trial.reserved_peak))

    ranked = sorted(
        trials.others, key=lambda one: (not one.avoids, one.failures, one.reserved_peak)
    )
    row("(the run's own)", trials.own)
    for trial in ranked[:_SHOWN]:
        row(trial.settings or "(the default ones)", trial)
    yield table
    if ranked[_SHOWN:]:
        yield Text(f"{len(ranked[_SHOWN:])} more do no better: --json lists them", style="dim")
    if trials.distrust:
        yield Text(f"Careful: {trials.distrust}.", style="bold")


def _help(lines: Iterable[str]) -> Iterator[RenderableType]:
    yield Text("what would help, cheapest first", style="bold")
    for number, line in enumerate(lines, 1):
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_column(justify="right", width=3)
        table.add_column(overflow="fold")
        table.add_row(f"{number}.", Text(line))
        yield table


def messages(name: str, found: Iterable[OomMessage]) -> Group:
    """All of ``memtrace explain LOGFILE``."""
    parts: list[RenderableType] = [Text(name, style="bold")]
    for message in found:
        conclusion = conclude(message)
        parts += [Text(), _message_title(message), Text()]
        if conclusion.kind is not None:
            parts.append(_verdict(str(conclusion.kind), conclusion.sure))
        parts += [Text(text) for text in (conclusion.words, *notes(message))]
        sizes = _sizes(message)
        if sizes.row_count:
            parts += [Text(), _indented(sizes)]
        parts += [Text(), Text("what the message doesn't tell", style="bold")]
        parts += [_indented(Text(text)) for text in conclusion.unknown]
        parts += [Text(), *_help(remedies(message, conclusion))]
    return Group(*parts)


def _message_title(message: OomMessage) -> Text:
    rank = "" if message.rank is None else f", rank {message.rank}"
    device = "" if message.device is None else f", GPU {message.device}"
    times = "" if message.times == 1 else f", {message.times:,} times"
    return Text.assemble(
        (f"line {message.line:,}{rank}{device}{times}", "bold"), f"  ({message.form})"
    )


def _sizes(message: OomMessage) -> Table:
    table = grid("", "", text=(0, 1))
    table.show_header = False
    rows: tuple[tuple[str, Rounded | None], ...] = (
        ("asked of the device", message.requested),
        ("device", message.total),
        ("free on it", message.free),
        ("used by this process", message.process),
        ("allowed", message.allowed),
        ("allocated", message.allocated),
        ("free in private pools", message.private),
        ("reserved, unallocated", message.unallocated),
    )
    for name, value in rows:
        if value is not None:
            table.add_row(name, value.text)
    return table


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2))
