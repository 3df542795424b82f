"""Several runs, term by term: what differs from the first one, in numbers and in sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from memtrace.analysis.places import OUTSIDE, Place
from memtrace.analysis.summary import AccountSummary, Summary
from memtrace.components import LIVE_COMPONENTS, PROCESS_COMPONENTS, TENSOR_COMPONENTS, base
from memtrace.errors import MemtraceError
from memtrace.sizes import format_size
from memtrace.trace.manifest import Knowledge

#: Components named in a verdict, at most.
_NAMED = 2

#: The terms of both equations in display order: equation (1), what is allocated, the process.
TERMS = (
    *(*LIVE_COMPONENTS, "live"),
    *("model", "backend", "other", "allocated"),
    *(*PROCESS_COMPONENTS, "process"),
)

Terms = Mapping[str, int | None]


@dataclass(frozen=True)
class Side:
    """One run of a comparison: each of :data:`TERMS` in bytes; None: unknown."""

    name: str
    summary: Summary
    account: AccountSummary
    at_peak: Terms
    own_peak: Terms


@dataclass(frozen=True)
class Comparison:
    """The first run of ``sides`` is what the others are compared with."""

    sides: tuple[Side, ...]
    verdicts: tuple[str, ...]
    #: Why the numbers may not be comparable.
    warnings: tuple[str, ...]


def difference(value: int | None, baseline: int | None) -> int | None:
    """Bytes more (or less) than the baseline; unknown if either is."""
    return None if value is None or baseline is None else value - baseline


def compare(summaries: Sequence[Summary]) -> Comparison:
    """Compare runs with the first of them, by the primary account of each.

    Raises:
        MemtraceError: a run saw no tensor.
    """
    names = [summary.name for summary in summaries]
    if len(set(names)) < len(names):
        names = [str(summary.folder) for summary in summaries]
    sides = tuple(_side(*pair) for pair in zip(names, summaries, strict=True))
    first, *others = sides
    return Comparison(
        sides,
        verdicts=tuple(text for other in others for text in _verdicts(first, other)),
        warnings=tuple(_warnings(sides)),
    )


def _side(name: str, summary: Summary) -> Side:
    account = summary.primary
    if account is None:
        raise MemtraceError(f"{name} saw no tensor, so there is nothing to compare")
    peak = account.peak
    sums = {"live": peak.live, "allocated": peak.allocated, "process": peak.process}
    own_sums = {
        "live": account.live_peak,
        "allocated": peak.allocated,
        "process": account.memory.peak,
    }
    process = {"allocator": peak.allocator, "external": peak.external}
    return Side(
        name,
        summary,
        account,
        at_peak={**peak.components, **process, **sums},
        own_peak={**account.own_peaks, **own_sums},
    )


def _verdicts(first: Side, other: Side) -> list[str]:
    """Two or three sentences, made of numbers that the tables show too."""
    base, peak = first.account.peak.allocated, other.account.peak.allocated
    text = f"{other.name} peaks at {format_size(peak)} allocated, {_against(peak, base)}"
    process = _process_verdict(first, other)
    found = [f"{text} {first.name}{process}."]
    if peak != base:
        found.append(_causes(first, other, peak - base))
    ours, theirs = other.account.above_steady, first.account.above_steady
    ratio = ""
    if min(ours, theirs) > 0 and ours != theirs:
        word = "less" if ours < theirs else "more"
        factor = f"{max(ours, theirs) / min(ours, theirs):,.1f}"
        ratio = "" if factor == "1.0" else f", {factor} times {word}"
    found.append(
        f"Above the steady state it takes {format_size(ours)} where {first.name} takes "
        f"{format_size(theirs)}{ratio}."
    )
    return found


def _against(value: int, baseline: int) -> str:
    if value == baseline:
        return "as much as"
    share = f" ({100 * abs(value - baseline) / baseline:.1f} %)" if baseline else ""
    return f"{format_size(abs(value - baseline))}{share} {'below' if value < baseline else 'above'}"


def _process_verdict(first: Side, other: Side) -> str:
    mine, base = other.own_peak["process"], first.own_peak["process"]
    if mine is None or base is None or mine == base:
        return ""
    word = "below" if mine < base else "above"
    return (
        f"; its process peaks at {format_size(mine)}, {format_size(abs(mine - base))} {word} "
        f"that of {first.name}"
    )


def _causes(first: Side, other: Side, total: int) -> str:
    """Which components make up the difference of the two peaks, and which go against it."""
    changes = {
        name: other.account.peak.components[name] - first.account.peak.components[name]
        for name in TENSOR_COMPONENTS
    }
    ordered = sorted((name for name in changes if changes[name]), key=lambda n: -abs(changes[n]))
    along = [name for name in ordered if (changes[name] > 0) == (total > 0)][:_NAMED]
    counter = [name for name in ordered if (changes[name] > 0) != (total > 0)][:_NAMED]
    verb = "make" if len(along) > 1 else "makes"
    text = f"At the peaks {_listed(along, changes)} {verb} the difference"
    text += f", against {_listed(counter, changes)}." if counter else "."
    return text + _whereabouts(along[0], other if total > 0 else first)


def _whereabouts(component: str, side: Side) -> str:
    """Where the run that peaks higher made most of what makes the difference."""
    places: dict[str, int] = {}
    for group in side.account.top:
        if base(group.component) == component:
            where = replace(group, place=Place(phase=group.place.phase)).where
            places[where] = places.get(where, 0) + group.bytes
    where = max(places, key=lambda place: places[place])
    if where == OUTSIDE:
        return ""
    return f" Of the {component} of {side.name} {format_size(places[where])} are made in {where}."


def _listed(names: Sequence[str], changes: Mapping[str, int]) -> str:
    return " and ".join(f"{name} ({format_size(changes[name], signed=True)})" for name in names)


def _warnings(sides: Sequence[Side]) -> list[str]:
    found = []
    for what, values in (
        ("known in different ways", [str(side.summary.knowledge) for side in sides]),
        ("on different devices", [side.account.device for side in sides]),
    ):
        if len(set(values)) > 1:
            pairs = zip(sides, values, strict=True)
            listed = ", ".join(f"{side.name} {value}" for side, value in pairs)
            found.append(f"The runs are {what}: {listed}.")
    ways = {side.summary.knowledge for side in sides}
    if len(ways) == 1 and Knowledge.MEASURED not in ways:
        found.append(f"Nothing here is measured: what is shown is {ways.pop()}.")
    for side in sides:
        if not side.account.identities.hold:
            found.append(f"{side.name} is inconsistent: {side.account.identities.problem}.")
        if side.summary.dropped:
            found.append(f"{side.name} dropped {side.summary.dropped:,} events.")
        if not side.summary.complete:
            found.append(f"{side.name} is not complete: its recorder was killed or still runs.")
    return found
