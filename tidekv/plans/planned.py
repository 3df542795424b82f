"""A prefill that was planned: its terms beside those of formulas, tensor by tensor."""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from memtrace.analysis.document import document
from memtrace.analysis.summary import AccountSummary, Summary, summarise
from memtrace.components import LIVE_COMPONENTS
from memtrace.devices import Device
from memtrace.sizes import format_size
from memtrace.trace.reader import Trace
from tidekv.errors import DOES_NOT_FIT
from tidekv.formulas import Moment, peak, sizes
from tidekv.formulas.asked import UnknownFormula, case_of

#: A larger difference between a term and its formula is explained.
_TOLERATED = 0.02
#: So many sizes are named of each side.
_NAMED = 2


@dataclass(frozen=True)
class Term:
    """One term of the equations at the peak of allocated, in bytes; None: unknown.

    ``note``: which tensors make a difference above two percent; empty: there is none.
    """

    name: str
    planned: int | None
    formula: int | None
    note: str = ""

    @property
    def difference(self) -> int | None:
        if self.planned is None or self.formula is None:
            return None
        return self.planned - self.formula


@dataclass(frozen=True)
class Plan:
    """One dry run.

    Attributes:
        method: its name.
        card: what it ran on; None: the CPU.
        prompt: tokens.
        trace: of the run.
        moment: its peak by formulas; None: none are known.
        unknown: why none are, in a clause.
        modelled: in a sentence, by which PyTorch's allocator and from what; empty: by the
            installed one itself.
    """

    method: str
    card: Device | None
    prompt: int
    trace: Trace
    moment: Moment | None
    unknown: str = ""
    modelled: str = ""

    @cached_property
    def summary(self) -> Summary:
        return summarise(self.trace)

    @property
    def account(self) -> AccountSummary | None:
        """Of the card, or the CPU; None: the run didn't come to use it."""
        kind = "cpu" if self.card is None else "cuda"
        found = self.summary.primary
        return found if found is not None and found.device.startswith(kind) else None

    @property
    def place(self) -> str:
        """What it ran on, as ``--device`` takes it."""
        return "cpu" if self.card is None else self.card.key

    @property
    def fits(self) -> bool:
        return not self.summary.ooms and self.summary.exit_code != DOES_NOT_FIT

    @property
    def reserved_peak(self) -> int | None:
        return self.account.reserved_peak if self.account is not None else None

    @property
    def headroom(self) -> int | None:
        """What was left of the card, less a context that is known; None where it didn't fit."""
        return self.account.headroom if self.account is not None and self.fits else None

    def terms(self) -> list[Term]:
        """Every term of both equations, in their order."""
        if self.account is None:
            return []
        return list(_terms(self.account, self.moment, explain=self.fits))

    def as_json(self) -> dict[str, Any]:
        """As ``memtrace report --json`` has it, and what only a plan knows."""
        return document(self.summary, top=10) | {
            "method": self.method,
            "card": self.place,
            "prompt_tokens": self.prompt,
            # Of the CPU's memory it isn't known what is there.
            "fits": None if self.card is None and self.fits else self.fits,
            "headroom": self.headroom,
            "reserved": {"peak": None if self.card is None else self.reserved_peak},
            "formula_peak": self.moment and self.moment.where,
            "formula_unknown": self.unknown or None,
            "modelled": self.modelled or None,
            "terms": [asdict(one) | {"difference": one.difference} for one in self.terms()],
        }


def moment_of(arguments: argparse.Namespace, card: Device | None) -> tuple[Moment | None, str]:
    """The peak by formulas; why there is none."""
    if card is None:
        return None, "the formulas are those of a card"
    try:
        return peak(case_of(arguments, card)), ""
    except UnknownFormula as error:
        return None, str(error)


def _terms(one: AccountSummary, moment: Moment | None, *, explain: bool) -> Iterator[Term]:
    at_peak = one.peak
    tensors = tensors_at_peak(one)

    def term(name: str, planned: int) -> Term:
        if moment is None:
            return Term(name, planned, None)
        formula = moment.of(name)
        large = explain and abs(planned - formula) > _TOLERATED * max(planned, formula)
        return Term(name, planned, formula, _explained(name, tensors, moment) if large else "")

    def terms(name: str) -> Iterator[Term]:
        yield term(name, at_peak.components[name])
        for detail, size in at_peak.details.items():
            if detail.startswith(f"{name}/"):
                yield term(detail, size)

    for name in LIVE_COMPONENTS:
        yield from terms(name)
    live = None if moment is None else sum(moment.of(name) for name in LIVE_COMPONENTS)
    yield Term("M_live", at_peak.live, live)
    for name in ("model", "backend", "other"):
        yield from terms(name)
    yield Term("allocated", at_peak.allocated, None if moment is None else moment.total)
    yield Term("allocator", at_peak.allocator, None)
    yield Term("external", at_peak.external, None)
    yield Term("process", at_peak.process, None)


def tensors_at_peak(one: AccountSummary) -> Mapping[str, Counter[int]]:
    """What is alive at the peak of allocated, by component: how many tensors of each size."""
    process, lives = one.account.process, one.account.lives
    events, components = process.events, process.contexts["component"]
    live = lives.allocated(one.peak.event)
    found: dict[str, Counter[int]] = {}
    for event in lives.labels_at(one.peak.event)[live].tolist():
        component = components[events["context"][event]]
        found.setdefault(component, Counter())[int(events["bytes"][event])] += 1
    return found


def _explained(name: str, tensors: Mapping[str, Counter[int]], moment: Moment) -> str:
    """The largest tensors of a component that the run alone has, and that the formula alone has."""

    def among(component: str) -> bool:
        return name in (component, component.partition("/")[0])

    run: Counter[int] = Counter()
    for component, counted in tensors.items():
        if among(component):
            run += counted
    formula = [one for one in moment.tensors if among(one.component)]
    names = {one.bytes: one.what for one in formula}
    theirs = Counter(sizes(formula))
    mine = (f"{count} × {format_size(size)} in the run only" for size, count in _most(run - theirs))
    other = (f"{count} × {names[size]} in the formula only" for size, count in _most(theirs - run))
    return "; ".join((*mine, *other))


def _most(counted: Counter[int]) -> list[tuple[int, int]]:
    """The sizes that make the most bytes."""
    return sorted(counted.items(), key=lambda item: -item[0] * item[1])[:_NAMED]
