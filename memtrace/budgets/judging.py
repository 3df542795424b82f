"""From a recording and limits to a finding."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from memtrace.analysis.blocks import Moment, Stretch, blocks, phases
from memtrace.budgets.plateau import judge_plateau, named_requests, repeated
from memtrace.budgets.recording import Recording
from memtrace.budgets.store import Values
from memtrace.budgets.verdicts import Finding, finding, judge
from memtrace.budgets.words import Limit, Plateau
from memtrace.errors import MemtraceError


def judge_stretches(
    label: str | None,
    recording: Recording,
    parts: Sequence[tuple[Sequence[Stretch], Sequence[Limit]]],
    reference: Callable[[Limit], Values],
    root: Path,
    card: str | None,
) -> Finding:
    """What stretches of a recording took, against limits; the first part's is what is kept.

    Args:
        label: of a block; None: of the test.
        recording: read as far as it is written.
        parts: stretches, and the limits on what they add.
        reference: what a relative limit is relative to.
        root: the folder whose frames are the user's.
        card: cards that aren't there and that the test runs on, which alone are judged then.
    """
    whole: Finding | None = None
    try:
        own, others = recording.processes()
        there = phases([own, *others])
        for stretches, limits in parts:
            found = blocks(own, others, stretches)
            if card is not None:
                found = [block for block in found if block.device != "cpu"] or _untouched(card)
            one = finding(label, found, judge(limits, found, there, reference), root, card)
            whole = one if whole is None else _joined(whole, one)
    except MemtraceError as error:
        return _unjudged(label, error, recording)
    assert whole is not None
    return whole if whole.good else _kept(whole, recording)


def _untouched(card: str) -> NoReturn:
    raise MemtraceError(f"nothing was allocated on {card}; is everything on the CPU?")


def judge_requests(
    wanted: Plateau, recording: Recording, start: Moment, ends: Sequence[Moment], root: Path
) -> Finding:
    """Whether memory stays where it is over the requests of a test.

    Args:
        wanted: what the marker says.
        recording: read as far as it is written.
        start: of the test's body.
        ends: of each of its runs.
        root: the folder whose frames are the user's.
    """
    try:
        own, others = recording.processes()
        requests = named_requests([own, *others], start, ends[-1]) or repeated(own, ends)
        one = judge_plateau(wanted, requests, root)
    except MemtraceError as error:
        return _unjudged("plateau", error, recording)
    return one if one.good else _kept(one, recording)


def made_requests(recording: Recording, start: Moment, end: Moment) -> bool:
    """Whether the test has named requests of its own, so that its body needn't be repeated."""
    own, others = recording.processes()
    return named_requests([own, *others], start, end) is not None


def _joined(first: Finding, second: Finding) -> Finding:
    first.limits += second.limits
    first.over += second.over
    first.top += second.top
    first.text = "\n\n".join(text for text in (first.text, second.text) if text)
    return first


def _unjudged(label: str | None, error: MemtraceError, recording: Recording) -> Finding:
    text = f"memory budget can't be judged: {error}"
    return _kept(Finding(label, problem=str(error), text=text), recording)


def _kept(one: Finding, recording: Recording) -> Finding:
    recording.keep = True
    return one.kept(recording.path, recording.start)
