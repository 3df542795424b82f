"""The sub-command ``tidekv plan``: its options, and what it prints."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tidekv.arguments import add_batch, add_memory, add_methods, add_model
from tidekv.errors import DOES_NOT_FIT, TidekvError
from tidekv.plans.checking import check

if TYPE_CHECKING:
    from rich.table import Table

    from tidekv.plans.capacity import Longest
    from tidekv.plans.cards import Candidate
    from tidekv.plans.planned import Plan

#: Raised when a key of ``plan --json`` changes its meaning or goes away.
_SCHEMA = 1

_EPILOG = """\
examples:
  tidekv plan --model llama-3.1-8b --prompt 65536 --budget 4096 --chunk-size 2048 \\
      --device a100-40g
  tidekv plan --model llama-3.1-8b --prompt 131072 --budget 4096 --device rtx-4090-24g \\
      --compare snapkv,mst,tidekv
  tidekv plan --model llama-3.1-8b --budget 4096 --device rtx-4090-24g --compare snapkv,tidekv \\
      --max-context
  tidekv plan --model llama-3.1-8b --prompt 131072 --budget 4096 --min-device
  tidekv plan --model llama-3.1-8b --prompt 131072 --budget 4096 --device l4-24g --fit
  tidekv plan --model llama-3.1-8b --prompts 16384,65536,131072 --budget 4096 \\
      --compare snapkv,tidekv

Methods of --compare: snapkv (whole_prompt), mst (the same, MLP in pieces of 4,096 rows), tidekv
(layer_major), published (layer_major_published), chunked, full (chunked, every row kept), online,
keydiff (online, by it), kivi (whole_prompt, every row kept in 2 bits), headinfer (head_offload,
every row kept). They share all other options. docs/plan.md says how the figures come about; --json
prints what memtrace report --json does, and fits, headroom, reserved.peak and terms.

exit status: 0 it fits, 3 it doesn't, 1 no virtual card can be had, 2 bad input, 130 interrupted.
"""


def add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the sub-command."""
    command = commands.add_parser(
        "plan",
        help="what a prompt takes on a card that isn't there",
        description="Run a prefill on a virtual card: what it takes, and whether it fits.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(command=_plan)
    add_model(command)
    command.add_argument("--prompt", type=int, metavar="N", help="tokens")
    add_batch(command)
    command.add_argument(
        "--device", metavar="CARD", help="of memtrace devices, such as a100-40g; or cpu"
    )
    command.add_argument(
        "--engine",
        choices=("auto", "virtual", "fake"),
        default="auto",
        help="virtual: PyTorch's build for CUDA with its own allocator; fake: any PyTorch, with "
        "ours (default: virtual where it runs)",
    )
    command.add_argument(
        "--allocator",
        default="",
        metavar="CONF",
        help="PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True (default: none)",
    )
    command.add_argument(
        "--torch",
        metavar="VERSION",
        help="by the allocator of this PyTorch, such as 2.11: modelled, from the requests that the "
        "installed one makes (default: the installed one itself)",
    )
    add_methods(command)
    add_memory(command)
    asked = command.add_argument_group("other questions")
    asked.add_argument("--compare", metavar="A,B,…", help="several methods, see below")
    asked.add_argument(
        "--max-context", action="store_true", help="the longest prompt that fits the card"
    )
    asked.add_argument(
        "--up-to",
        type=int,
        default=1 << 18,
        metavar="N",
        help="tokens up to which --max-context looks (default: %(default)s)",
    )
    asked.add_argument("--min-device", action="store_true", help="which cards suffice")
    asked.add_argument(
        "--fit",
        action="store_true",
        help="what makes the prompt fit the card, cheapest first, with layer_major",
    )
    asked.add_argument(
        "--prompts",
        metavar="N,N,…",
        help="the peaks of several lengths (default card: the largest)",
    )
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="RUN",
        help="keep the run; with --compare a folder of runs",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead")


def _plan(arguments: argparse.Namespace) -> None:
    from memtrace.errors import MemtraceError

    check(arguments, _methods(arguments).values())
    try:
        if arguments.fit:
            from tidekv.plans.fit_command import fitted

            fits = fitted(arguments, _SCHEMA)
        elif arguments.prompts is not None:
            from tidekv.plans.curve_command import curves_answered

            fits = curves_answered(arguments, _methods(arguments), _SCHEMA)
        else:
            fits = (_longest if arguments.max_context else _planned)(arguments)
    except MemtraceError as error:
        raise TidekvError(f"{error}.") from error
    if not fits:
        sys.stdout.flush()
        sys.exit(DOES_NOT_FIT)


def _methods(arguments: argparse.Namespace) -> dict[str, argparse.Namespace]:
    from tidekv.plans import planning

    if arguments.compare is None:
        return {planning.name_of(arguments): arguments}
    names = [name.strip() for name in arguments.compare.split(",")]
    return {name: planning.named(arguments, name) for name in names}


def _planned(arguments: argparse.Namespace) -> bool:
    """Plan each method; whether all of them fit."""
    from tidekv.plans import cards, planning

    if arguments.device is None:
        arguments.device = cards.largest_card().key
    with _runs(arguments) as runs:
        found = [
            planning.plan(chosen, name, runs(name)) for name, chosen in _methods(arguments).items()
        ]
        from memtrace.render import natural, show

        judged = None
        if arguments.min_device:  # of a card that is too small nothing follows
            account = found[0].account if found[0].fits else None
            judged = cards.candidates(found[0].trace, account) if account else []
        if arguments.json:
            plans = [one.as_json() for one in found]
            body = {"plans": plans} if arguments.compare else plans[0]
            if judged is not None:
                body["cards"] = [one.as_json() for one in judged]
            print(json.dumps({**body, "schema": _SCHEMA}, indent=2))
        elif arguments.compare:
            table = compared(found)
            show(table, least=natural(table))
        elif judged is not None:
            show(sufficient(judged)) if judged else print(verdict(found[0]))
        else:
            show(equations(found[0]))
            print(where(found[0]))
        if not arguments.json and judged is None:
            for one in found:
                print(verdict(one))
                if one.modelled:
                    print(one.modelled)
    return all(one.fits for one in found)


@contextmanager
def _runs(arguments: argparse.Namespace) -> Iterator[Callable[[str], Path]]:
    """Where the run of each method goes."""
    with tempfile.TemporaryDirectory(prefix="tidekv-") as scratch:
        kept = arguments.output
        if kept is not None and not arguments.compare:
            yield lambda name: kept
            return
        folder = Path(scratch) if kept is None else kept
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TidekvError(f"The folder {folder} can't be made: {error.strerror}.") from error
        yield lambda name: folder / f"{name.replace(', ', '-')}.memtrace"


def equations(found: "Plan") -> "Table":
    """Both equations at the peak, the formulas' values beside the planned ones."""
    from rich.text import Text

    from memtrace.components import COLOURS
    from memtrace.render import grid, size, swatch

    when = "at the peak" if found.fits else "when it failed"
    headers = ["", when, *(["formula", "difference"] if found.moment else []), ""]
    table = grid(*headers, text=(0, len(headers) - 1))
    notes = {"M_live": "(1)", "process": "(2)"}
    for one in found.terms():
        label: Text | str = f"    {one.name}"
        if one.name in COLOURS:
            label = swatch(one.name)
        elif one.name in ("M_live", "allocated", "process"):
            label = Text(one.name, style="bold")
        cells = [size(one.planned)]
        if found.moment:
            known = one.formula is not None
            cells.append(size(one.formula) if known else "")
            cells.append(size(one.difference, signed=True) if known and found.fits else "")
        table.add_row(label, *cells, Text(one.note or notes.get(one.name, ""), style="dim"))
    return table


def where(found: "Plan") -> str:
    """Where the peak was, and where it is by formula."""
    place = found.account.place.within if found.account else "nowhere"
    if found.moment is None:
        return f"peak {place}. No formulas are known for this: {found.unknown}."
    return f"peak {place}; by formula: {found.moment.where}"


def compared(found: "Sequence[Plan]") -> "Table":
    """A column a method."""
    from memtrace.components import TENSOR_COMPONENTS
    from memtrace.render import grid, size, swatch

    table = grid("", *(one.method for one in found))
    peaks = [one.account.peak if one.account is not None else None for one in found]
    table.add_row("fits", *("yes" if one.fits else "no" for one in found))
    for name in TENSOR_COMPONENTS:
        cells = (None if peak is None else peak.components[name] for peak in peaks)
        table.add_row(swatch(name), *map(size, cells))
    allocated = (None if peak is None else peak.allocated for peak in peaks)
    table.add_row("allocated", *map(size, allocated))
    formulas = (size(one.moment.total) if one.moment else "-" for one in found)
    table.add_row("  by formula", *formulas)
    table.add_row("reserved at most", *(size(one.reserved_peak) for one in found))
    table.add_row("left", *(size(one.headroom) if one.fits else "-" for one in found))
    return table


def sufficient(cards: "Sequence[Candidate]") -> "Table":
    """A line a card."""
    from memtrace.render import grid, size

    table = grid("card", "memory", "left", "context", "suffices", text=(0, 4))
    for one in cards:
        if one.fits:
            word = "yes, if it gives back what it caches" if one.retries else "yes"
        elif one.lacks:
            word = f"no, {size(one.lacks)} are lacking"
        else:
            word = "no, what is free comes in pieces"
        left = size(one.left) if one.fits else "-"
        table.add_row(one.card.key, size(one.card.total), left, size(one.card.context), word)
    return table


def verdict(found: "Plan") -> str:
    """One sentence."""
    from memtrace.render import size

    if found.card is None:
        allocated = found.account.peak.allocated if found.account is not None else None
        return (
            f"{found.method}: {found.prompt:,} tokens take {size(allocated)} of the CPU's memory."
        )
    total = size(found.card.total)
    if not found.fits:
        needed = f" By formula it takes {size(found.moment.total)}." if found.moment else ""
        return (
            f"{found.method}: {found.prompt:,} tokens don't fit {found.card.name} ({total}): "
            f"{_lacking(found)}.{needed}"
        )
    if found.reserved_peak is None:
        return (
            f"{found.method}: {found.prompt:,} tokens fit {found.card.name} ({total}); what this "
            "allocator reserves isn't known."
        )
    context = "less a CUDA context, whose size isn't known"
    if found.card.context is not None:
        context = f"beside {size(found.card.context)} for a CUDA context"
    return (
        f"{found.method}: {found.prompt:,} tokens fit {found.card.name} ({total}): "
        f"{size(found.reserved_peak)} reserved at most, {size(found.headroom)} left ({context})."
    )


def _lacking(found: "Plan") -> str:
    """What there was no room for, in a clause."""
    from memtrace.render import size

    if found.summary.ooms:
        oom = found.summary.ooms[-1]
        return f"{size(oom.requested)} were asked for {oom.place.within}"
    lacking = "what was asked for isn't known under this allocator"
    if found.card is not None and found.card.pool is not None:
        lacking += f", whose pool holds {size(found.card.pool)} at most there"
    return lacking


def _longest(arguments: argparse.Namespace) -> bool:
    """Search for each method; whether each reads some prompt."""
    from memtrace.render import show, size
    from tidekv.plans import cards, searches

    found = {name: searches.longest(chosen) for name, chosen in _methods(arguments).items()}
    card = cards.card_of(arguments.device)
    if arguments.json:
        methods = [{"method": name, **asdict(one)} for name, one in found.items()]
        body = {"schema": _SCHEMA, "card": card.key, "methods": methods}
        print(json.dumps(body, indent=2))
    else:
        show(capacity(found))
        print(f"Tokens of a prompt of {arguments.model} that fit {card.name} ({size(card.total)}).")
    return all(one.prompt for one in found.values())


def capacity(found: "dict[str, Longest]") -> "Table":
    """A line a method."""
    from memtrace.render import grid, size

    table = grid("method", "longest prompt", "reserved", "does not fit", "tried")
    for name, one in found.items():
        reserved = {probe.prompt: probe.reserved_peak for probe in one.probes}.get(one.prompt)
        beyond = "more was not tried" if one.shorter_than is None else f"{one.shorter_than:,}"
        table.add_row(name, f"{one.prompt:,}", size(reserved), beyond, str(len(one.probes)))
    return table
