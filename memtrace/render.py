"""Summaries as text for a terminal: colours only there, whole numbers at any width."""

import io
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memtrace.analysis.compare import TERMS, Comparison, Side, difference
from memtrace.analysis.oom import Oom
from memtrace.analysis.peaks import Group as Allocations
from memtrace.analysis.process import Samples
from memtrace.analysis.summary import AccountSummary, Planned, Request, Summary, Values
from memtrace.components import COLOURS, LIVE_COMPONENTS
from memtrace.sizes import format_size
from memtrace.trace.manifest import Knowledge

UNKNOWN = "unknown"
#: Width of the widest size. Longer headers wrap, so that a table of sizes fits in 80 columns.
_NUMBER = len("-1023.99 GiB")
_SUMS = {"live": "M_live", "allocated": "allocated", "process": "process"}


def show(part: RenderableType, least: int = 0) -> None:
    """Print on stdout, ``least`` columns wide or more: in colour on a terminal, plain otherwise."""
    width = max(shutil.get_terminal_size().columns, least)
    text = to_text(part, width, colour=sys.stdout.isatty())
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end="")


def natural(table: Table) -> int:
    """The columns that a table takes if nothing in it is cut or wrapped."""
    return Console(width=1 << 12).measure(table).maximum


def to_text(part: RenderableType, width: int = 80, *, colour: bool = False) -> str:
    """The same as text, without trailing spaces."""
    out = io.StringIO()
    # A name or a path in a trace is text, not markup.
    console = Console(
        file=out, width=width, force_terminal=colour, highlight=False, markup=False, emoji=False
    )
    console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def size(value: int | None, *, signed: bool = False) -> str:
    """Bytes, or the word for not knowing them."""
    return UNKNOWN if value is None else format_size(value, signed=signed)


def seconds(time_us: int | None) -> str:
    """Microseconds since the start of the run, as seconds."""
    return UNKNOWN if time_us is None else f"{time_us / 1e6:.3f} s"


def swatch(component: str) -> Text:
    """A component's name in front of its colour (the colour shows on a terminal only)."""
    return Text.assemble(("■ ", COLOURS[component]), component)


def grid(*headers: str, text: Iterable[int] = (0,)) -> Table:
    """A table whose columns are numbers, but for those in ``text``."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, header in enumerate(headers):
        if number in set(text):
            table.add_column(header, overflow="fold")
        else:
            table.add_column(
                "\n".join(textwrap.wrap(header, _NUMBER)), justify="right", no_wrap=True
            )
    return table


def header(summary: Summary) -> Table:
    """The facts of a run as a table."""
    table = grid("", "", text=(0, 1))
    table.show_header = False
    for key, value in facts(summary).items():
        table.add_row(Text(key, style="dim"), Text(value))
    return table


def facts(summary: Summary) -> dict[str, str]:
    """What was run, how its bytes are known, and what is missing."""
    one = summary.primary
    rows = {"command": " ".join(summary.command) or UNKNOWN, "known": _known(summary)}
    if summary.planned is not None:
        rows["planned"] = _planned(summary.planned)
    if summary.events or summary.dropped:
        rows["events"] = _events(summary)
    rows["recording"] = _recording(summary)
    if summary.death is not None:
        rows["ended"] = "\n- ".join([summary.death.verdict, *summary.death.evidence])
    if one is not None and one.headroom is not None:
        rows["device"] = _headroom(one)
    elif summary.knowledge is Knowledge.VIRTUAL and (one is None or one.device == "cpu"):
        rows["device"] = "the virtual card was never used: this ran on the CPU, and was computed"
    found = [process.values for process in summary.processes if process.values]
    if found:
        rows["values"] = _values(found)
    if one is not None and one.memory.missing:
        rows["process"] = f"memory unknown: {one.memory.missing}"
    if summary.rules:
        rows["classified"] = f"by rules of {', '.join(summary.rules)}"
    buffers = [process.buffers for process in summary.processes if process.buffers]
    if buffers:
        where = "in host memory" if one is not None and one.device != "cpu" else "part of external"
        rows["recorder"] = f"{format_size(max(buffers))} of buffers at most, {where}"
    if one is not None:
        rows["identities"] = (
            f"hold at all {one.identities.events:,} events"
            if one.identities.hold
            else f"inconsistent: {one.identities.problem}"
        )
    return rows


def _headroom(one: AccountSummary) -> str:
    """The card, the most that was reserved on it, and what was left."""
    context = "a CUDA context's size isn't known and not counted"
    if one.context is not None:
        context = f"with {format_size(one.context)} for a CUDA context"
    left = f"{format_size(one.headroom or 0)} were left"
    return (
        f"{one.device_name}, {size(one.device_total)}: {size(one.reserved_peak)} reserved at most, "
        f"{left}" + (f" ({context})" if one.memory.missing else "")
    )


def _values(found: Sequence[Values]) -> str:
    """What was read and chosen without being computed, in one row."""
    caveats = [one.caveat for one in found if one.caveat]
    choices = sum(one.choices for one in found)
    return "; ".join(caveats or ["no unknown value was read"]) + f"; {choices:,} stated choices"


def unknown_reads(found: Iterable[Values]) -> Table:
    """Where values were read that weren't computed."""
    table = grid("unknown values read", "times", "at", text=(0, 2))
    for read in (read for one in found for read in one.places):
        table.add_row(read.op, f"{read.count:,}", read.where or UNKNOWN)
    return table


def out_of_memory(oom: Oom, top: int) -> Group:
    """What an out-of-memory error met."""
    title = Text.assemble(
        ("out of memory ", "bold"),
        (f"asking for {format_size(oom.requested)}", "bold"),
        f" on {oom.device} at {seconds(oom.time_us)}\n  {oom.place.within}",
    )
    table = grid("", "", text=(0,))
    table.show_header = False
    for name, value in (
        ("device", oom.total),
        ("free on it", oom.free),
        ("outside the allocator", oom.outside),
        ("reserved", oom.reserved),
        ("allocated", oom.allocated),
        ("inactive split", oom.inactive_split),
        ("largest free block", oom.largest_free_block),
    ):
        table.add_row(name, size(value))
    for name, value in oom.components.items():
        if value:
            table.add_row(swatch(name), size(value))
    parts: list[RenderableType] = [title, Text(oom.verdict), Text(), _indented(table)]
    if top:
        parts += [Text(), allocations(oom.top[:top])]
    return Group(*parts)


def _planned(found: Planned) -> str:
    settings = f" with {found.allocator}" if found.allocator else ""
    lines = [f"for {found.device}{settings} by the engine {found.engine}"]
    lines += [f"- modelled: {text}" for text in found.modelled]
    return "\n".join([*lines, *(f"- unknown: {text}" for text in found.unknown)])


def _known(summary: Summary) -> str:
    one = summary.primary
    torch = next((p.torch for p in summary.processes if p.torch), None)
    parts = [str(summary.knowledge)]
    if one is not None:
        parts.append(f"on {one.device}, process {one.pid}")
    parts.append(f"torch {torch}" if torch else "torch was never imported")
    return ", ".join(parts)


def _events(summary: Summary) -> str:
    dropped = f"{summary.dropped:,} dropped" if summary.dropped else "none dropped"
    return f"{summary.events:,}, {dropped}"


def _recording(summary: Summary) -> str:
    lost = sum(summary.torn.values())
    if not summary.complete:
        text = "the recorder was killed or still runs"
    elif summary.exit_signal is not None:
        text = f"complete; the command was ended by signal {summary.exit_signal}"
    elif summary.exit_code is not None:
        text = f"complete; exit code {summary.exit_code}"
    else:
        text = "complete"
    if summary.complete and any(one.state == "recording" for one in summary.processes):
        text += "; a process was killed, and what it did in its last moment isn't in the trace"
    return f"{text}; {lost:,} bytes after the last whole batch dropped" if lost else text


def peak_line(one: AccountSummary) -> Text:
    """Where and when the allocated bytes peaked."""
    where = f"{seconds(one.peak.time_us)}, event {one.peak.event:,}"
    return Text.assemble(
        ("peak of allocated ", "bold"),
        (format_size(one.peak.allocated), "bold"),
        f" at {where}\n  {one.place.within}",
    )


def equations(one: AccountSummary) -> Table:
    """Both equations: every term at the peak of allocated, its share of it, and its own peak."""
    table = grid("", "at the peak", "share", "own peak", "", text=(0, 4))
    peak = one.peak

    def row(label: str | Text, at_peak: int, own: int | None, note: str = "") -> None:
        share = f"{100 * at_peak / peak.allocated:.1f} %" if peak.allocated else ""
        table.add_row(label, size(at_peak), share, size(own), Text(note, style="dim"))

    def process_row(label: Text, at_peak: int | None, own: int | None, note: str) -> None:
        table.add_row(label, size(at_peak), "", size(own), Text(note, style="dim"))

    def part_row(label: str, at_peak: int, note: str) -> None:
        table.add_row(f"    {label}", size(at_peak), "", "", Text(note, style="dim"))

    def component(name: str) -> None:
        row(swatch(name), peak.components[name], one.own_peaks[name])
        for detail, own in one.details.items():
            if detail.partition("/")[0] == name:
                row(f"    {detail}", peak.details[detail], own)

    for name in LIVE_COMPONENTS:
        component(name)
    row(Text("M_live", style="bold"), peak.live, one.live_peak, "(1) sum of these")
    table.add_row()
    for name in ("model", "backend", "other"):
        component(name)
    row(Text("allocated", style="bold"), peak.allocated, peak.allocated, "M_live and these")
    table.add_row()
    note = "no caching allocator on the CPU" if one.device == "cpu" else "reserved - allocated"
    process_row(swatch("allocator"), peak.allocator, one.own_peaks["allocator"], note)
    if one.device != "cpu" and peak.allocator is not None:
        reserved = Text("reserved", style="bold")
        process_row(reserved, peak.allocated + peak.allocator, one.reserved_peak, "both")
    note = "process - reserved"
    process_row(swatch("external"), peak.external, one.own_peaks["external"], note)
    for label, value, part_note in _external(one):
        part_row(label, value, part_note)
    note = f"(2) {_process_note(one)}"
    process_row(Text("process", style="bold"), peak.process, one.memory.peak, note)
    if one.beside:
        table.add_row()
    for label, found, beside_note in _beside(one):
        process_row(Text(label), found.at(peak.time_us), found.peak, beside_note)
    return table


def _external(one: AccountSummary) -> Iterator[tuple[str, int, str]]:
    """What external is made of: name, bytes at the peak, and what that means."""
    if one.external is not None:
        yield "base", one.external.base, "before the first tensor"
        yield "growth", one.external.growth, "since then"
        apart = f"{abs(one.external.apart_us) / 1000:.0f} ms between sample and peak"
        yield "residual", one.external.residual, apart


def _beside(one: AccountSummary) -> Iterator[tuple[str, Samples, str]]:
    """Memory that is no term of the equations."""
    total = "" if one.device_total is None else f"of {format_size(one.device_total)}"
    for name, label, note in (
        ("others", "others", "other processes and the driver"),
        ("used", "device", total),
        ("pinned", "pinned", "in the host's memory"),
    ):
        if name in one.beside:
            yield label, one.beside[name], note


def _process_note(one: AccountSummary) -> str:
    if one.memory.source is None or one.memory.peak is None:
        return "not measured"
    exact = ", own peak exact" if one.memory.high_water is not None else ", sampled"
    return one.memory.source.upper() + exact


def allocations(groups: Iterable[Allocations], title: str = "live at the peak") -> Table:
    """What was live at an instant, grouped by what made it."""
    table = grid(title, "bytes", "count", "made in", text=(0, 3))
    for group in groups:
        name = group.component.partition("/")[0]
        label = Text.assemble(("■ ", COLOURS[name]), group.component)
        made = Text("\n").join([Text(group.where), *(Text(f"  {frame}") for frame in group.stack)])
        table.add_row(label, format_size(group.bytes), f"{group.count:,}", made)
    return table


def requests(rows: Iterable[Request]) -> Table:
    """The requests of a workload."""
    table = grid("request", "prompt", "generated", "first token", "total", "outcome", text=(0, 5))
    for row in rows:
        table.add_row(
            row.name or UNKNOWN,
            _count(row.prompt_tokens),
            _count(row.generated_tokens),
            _elapsed(row.start_us, row.first_token_us),
            _elapsed(row.start_us, row.end_us),
            row.outcome or UNKNOWN,
        )
    return table


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _elapsed(start_us: int | None, end_us: int | None) -> str:
    return "-" if start_us is None or end_us is None else f"{(end_us - start_us) / 1e6:.3f} s"


def processes(summary: Summary) -> Table:
    """Every process and what it held on each device, recorded or not, and all of them together."""
    ranked = any(process.rank is not None for process in summary.processes)
    first = ("process", "rank") if ranked else ("process",)
    names = (*first, "peak RSS", "allocated", "state", "command")
    table = grid(*names, text=(0, len(names) - 2, len(names) - 1))

    def row(name: str, rank: int | None, *cells: str) -> None:
        table.add_row(name, *([] if not ranked else ["" if rank is None else str(rank)]), *cells)

    for process in summary.processes:
        peaks = [
            f"{one.device} {format_size(one.peak.allocated)}"
            for one in summary.accounts
            if one.folder == process.folder
        ]
        state = f"{process.state}: {process.reason}" if process.reason else process.state
        rss, allocated = size(process.memory.peak), "\n".join(peaks) or "no tensors"
        row(str(process.pid), process.rank, rss, allocated, state, " ".join(process.argv))
    for one in summary.unrecorded:
        state = f"not recorded: {one.reason or 'why is unknown'}"
        command = " ".join(one.argv) or UNKNOWN
        row(str(one.pid), None, size(one.rss_peak), UNKNOWN, state, command)
    for title, field in (("sum of peaks", "of_peaks"), ("peak of sum", "peak")):
        if summary.sums:
            values = {name: format_size(getattr(one, field)) for name, one in summary.sums.items()}
            held = [
                f"{name.partition(':')[2]} {value}"
                for name, value in values.items()
                if name.startswith("allocated:")
            ]
            row(title, None, values.get("rss", UNKNOWN), "\n".join(held), "", "")
    return table


def report(summary: Summary, top: int) -> Group:
    """All of ``memtrace report``."""
    parts: list[RenderableType] = [Text(summary.name, style="bold"), _indented(header(summary))]
    one = summary.primary
    if summary.ooms:
        last = summary.ooms[-1]
        at_peak = one is not None and last.allocated == one.peak.allocated
        parts += [Text(), out_of_memory(last, 0 if at_peak else top)]
    if one is None:
        memory = summary.memory
        peak = memory.peak if memory else None
        parts += [Text(), Text(f"No tensor was seen. Peak process memory: {size(peak)}.")]
    else:
        steady = f"above the steady state {format_size(one.above_steady)}"
        definition = "  peak of allocated - model in the prefill, less the compact KV it leaves"
        parts += [Text(), peak_line(one), Text(), _indented(equations(one)), Text()]
        parts += [Text(steady, style="bold"), Text(definition, style="dim")]
        if top:
            parts += [Text(), allocations(one.top[:top])]
    if summary.requests:
        parts += [Text(), requests(summary.requests)]
    several = len(summary.processes) + len(summary.unrecorded) > 1 or len(summary.accounts) > 1
    if several or one is None:
        parts += [Text(), processes(summary)]
    values = [process.values for process in summary.processes if process.values]
    if any(found.places for found in values):
        parts += [Text(), unknown_reads(values)]
    unseen = sorted({text for process in summary.processes for text in process.unseen})
    if unseen:
        parts += [Text("\nnot seen", style="bold"), *(_indented(Text(text)) for text in unseen)]
    return Group(*parts)


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2))


def comparison(found: Comparison) -> Group:
    """All of ``memtrace compare``."""
    first, *others = found.sides
    parts: list[RenderableType] = []
    for other in others:
        parts += [_pair(first, other), Text()]
    parts += [Text(text) for text in found.verdicts]
    if found.warnings:
        parts.append(Text())
        parts += [Text(f"Careful: {text}", style="bold") for text in found.warnings]
    return Group(*parts)


def _pair(first: Side, other: Side) -> Table:
    table = grid("", first.name, other.name, "difference", "")
    for title, mine, base in (
        ("at the peak of allocated", other.at_peak, first.at_peak),
        ("own peak of each", other.own_peak, first.own_peak),
    ):
        table.add_row(Text(title, style="bold"))
        for name in TERMS:
            label = swatch(name) if name in COLOURS else Text(_SUMS[name], style="bold")
            _difference_row(table, label, mine[name], base[name])
        table.add_row()
    steady = Text("above the steady state", style="bold")
    _difference_row(table, steady, other.account.above_steady, first.account.above_steady)
    return table


def _difference_row(table: Table, label: Text, value: int | None, baseline: int | None) -> None:
    change = difference(value, baseline)
    share = f"{100 * change / baseline:+.1f} %" if change and baseline else ""
    table.add_row(label, size(baseline), size(value), size(change, signed=True), share)
