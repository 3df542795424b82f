"""What ``tidekv plan`` does: dry runs of ``tidekv run`` on cards that aren't there.

A plan is a recorded run like another; beside its terms stand those of :mod:`tidekv.formulas`. No
torch here: the planned process alone loads it.
"""

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from memtrace.allocator.settings import NEWEST, Version, parse_version
from memtrace.analysis.document import document
from memtrace.analysis.summary import AccountSummary, Summary, summarise
from memtrace.analysis.what_if import Change, replayed
from memtrace.components import LIVE_COMPONENTS
from memtrace.devices import Device
from memtrace.dryrun import dry_run
from memtrace.sizes import format_size
from memtrace.trace.reader import Trace, open_trace
from memtrace.virtual_gpu import READ_UNFOLLOWED, SAID
from memtrace.virtual_gpu.torches import version_of
from tidekv.errors import TidekvError, check_choice
from tidekv.formulas import Moment, peak, sizes
from tidekv.formulas.asked import PLACEMENT, UnknownFormula, case_of
from tidekv.plans.cards import card_of, largest_card

#: Methods that have a name; what they set of the command line.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "snapkv": {"schedule": "whole_prompt", "chunk_size": None, "piece_rows": None},
    "mst": {
        "schedule": "whole_prompt",
        "schedule_option": ["mlp_rows=4096"],
        "chunk_size": None,
        "piece_rows": None,
    },
    "tidekv": {"schedule": "layer_major"},
    "published": {"schedule": "layer_major_published", "piece_rows": None},
    "chunked": {"schedule": "chunked"},
    "full": {"schedule": "chunked", "selector": "none"},
    "online": {"schedule": "online"},
    "keydiff": {"schedule": "online", "selector": "keydiff"},
    "kivi": {
        "schedule": "whole_prompt",
        "selector": "none",
        "cache": "kivi",
        "chunk_size": None,
        "piece_rows": None,
    },
    "headinfer": {"schedule": "head_offload", "selector": "none"},
}
#: Options of ``tidekv run`` that a plan hands on, by their names in the command line.
_PASSED = (
    *("model", "schedule", "selector", "cache", "budget", "chunk_size", "schedule_option"),
    *("selector_option", "cache_option", "scoring", "attention", "dtype", "batch", "piece_rows"),
    *PLACEMENT,
)
#: PyTorch warns of each request that meets no room; that is what is asked here.
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
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
        return not self.summary.ooms

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
            "fits": self.fits,
            "headroom": self.headroom,
            "reserved": {"peak": self.reserved_peak},
            "formula_peak": self.moment and self.moment.where,
            "formula_unknown": self.unknown or None,
            "modelled": self.modelled or None,
            "terms": [asdict(one) | {"difference": one.difference} for one in self.terms()],
        }


def named(arguments: argparse.Namespace, name: str) -> argparse.Namespace:
    """The command line with a method of :data:`METHODS`.

    Raises:
        InfeasibleError: there is none of this name.
    """
    check_choice("method", name, METHODS)
    return argparse.Namespace(**{**vars(arguments), **METHODS[name]})


def name_of(arguments: argparse.Namespace) -> str:
    """A method's name, or what was chosen in words."""
    for name, chosen in METHODS.items():
        plain = {"selector": "snapkv", "schedule_option": []}
        if all(getattr(arguments, key) == value for key, value in (plain | dict(chosen)).items()):
            return name
    return f"{arguments.schedule}, {arguments.selector}"


def options(arguments: argparse.Namespace) -> list[str]:
    """What of the command line is an option of ``tidekv run``."""
    found: list[str] = []
    for name in _PASSED:
        value, flag = getattr(arguments, name), f"--{name.replace('_', '-')}"
        if value is True:
            found.append(flag)
        elif isinstance(value, list):
            found += [part for one in value for part in (flag, one)]
        elif value is not None and value is not False:
            found += [flag, str(value)]
    return found


def plan(arguments: argparse.Namespace, method: str, out: Path) -> Plan:
    """Plan one prompt; the new run is ``out``.

    Raises:
        TidekvError: bad input, or no virtual card can be had.
        SystemExit: the planned run failed, and has said why.
    """
    if out.exists():
        raise TidekvError(f"{out} is there already; remove it or name another with -o.")
    if arguments.torch and parse_version(arguments.torch) != _installed():
        return _modelled(arguments, method, out)
    words = ["run", *options(arguments), "--prompt-tokens", str(arguments.prompt)]
    words += ["--max-new-tokens", "0", "--json"]
    if arguments.device == "cpu":  # the same command as a run there
        card, moment, unknown = None, None, "the formulas are those of a card"
        words += ["--device", "cpu"]
    else:
        card = card_of(arguments.device)
        moment, unknown = _moment(arguments, card)
        words += ["--device", "cuda", "--untrained"]
    trace, _ = run(arguments, ["tidekv", *words], out)
    found = Plan(method, card, arguments.prompt, trace, moment, unknown)
    if found.fits:
        check_ended(trace)
    return found


def _installed() -> Version:
    return parse_version(version_of([sys.executable]))


def _modelled(arguments: argparse.Namespace, method: str, out: Path) -> Plan:
    """As :func:`plan`, by the allocator of another PyTorch: a replay of the installed one's run.

    Where that runs out of memory its requests end there, so those on the largest card are taken.
    """
    version, card = arguments.torch, card_of(arguments.device)
    if parse_version(version) > NEWEST:
        newest = ".".join(map(str, NEWEST))
        raise TidekvError(f"The allocator of torch {version} isn't known; the newest is {newest}.")
    change = Change(arguments.allocator, card.key, version)
    with tempfile.TemporaryDirectory(prefix="tidekv-") as scratch:
        for number, device in enumerate((card.key, largest_card().key)):
            here = argparse.Namespace(**{**vars(arguments), "device": device, "torch": None})
            here.allocator = ""
            found = plan(here, method, Path(scratch) / f"{number}.memtrace")
            if found.fits:
                break
        if found.account is None:  # it failed before it used the card, and has said why
            raise SystemExit(1)
        replayed(found.trace, found.account.account, change, out)
    trace = open_trace(out)
    installed = ".".join(map(str, _installed()))
    sentence = (
        f"Modelled: by the rules of torch {version}'s allocator, from the requests that torch "
        f"{installed} makes on {card_of(device).name}."
    )
    moment, unknown = _moment(arguments, card)
    return Plan(method, card, arguments.prompt, trace, moment, unknown, sentence)


def run(
    arguments: argparse.Namespace, words: Sequence[str], out: Path, source: str = "auto"
) -> tuple[Trace, str]:
    """Dry-run ``python -m WORDS…``; its trace and its standard output.

    Hardly a prefill reads a value, so first without following them.
    """
    trace, text = _run_once(arguments, words, out, source, follow_values=False)
    if trace.manifest["exit"]["code"] == READ_UNFOLLOWED:
        shutil.rmtree(out)
        trace, text = _run_once(arguments, words, out, source, follow_values=True)
    return trace, text


def _run_once(
    arguments: argparse.Namespace,
    words: Sequence[str],
    out: Path,
    source: str,
    *,
    follow_values: bool,
) -> tuple[Trace, str]:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
        trace = dry_run(
            [sys.executable, "-m", *words],
            device=arguments.device,
            out=out,
            engine=arguments.engine,
            allocator=arguments.allocator,
            source=source,
            variables=_QUIET | ({SAID: "1"} if follow_values else {}),  # it was said before
            stdout=said.fileno(),
            follow_values=follow_values,
        )
        said.seek(0)
        return trace, said.read()


def check_ended(trace: Trace) -> None:
    """End as a planned process did that had room and failed.

    It has said why, unless it was killed.
    """
    ended = trace.manifest["exit"]
    code = ended["code"] if ended["code"] is not None else 128 + ended["signal"]
    if code == 130:
        raise KeyboardInterrupt
    if ended["code"] is None:
        verdict = trace.manifest["death"]["verdict"]
        print(f"tidekv: The planned process was {verdict}.", file=sys.stderr)
    if code:
        raise SystemExit(code)


def _moment(arguments: argparse.Namespace, card: Device) -> tuple[Moment | None, str]:
    """The peak by formulas; why there is none."""
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

    for name in LIVE_COMPONENTS:
        yield term(name, at_peak.components[name])
        for detail, size in at_peak.details.items():
            if detail.startswith(f"{name}/"):
                yield term(detail, size)
    live = None if moment is None else sum(moment.of(name) for name in LIVE_COMPONENTS)
    yield Term("M_live", at_peak.live, live)
    for name in ("model", "backend", "other"):
        yield term(name, at_peak.components[name])
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
