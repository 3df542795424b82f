"""Replay a run under another allocator: other settings, another PyTorch, another card.

The requests of the run go through an exact simulation of PyTorch's CUDA caching allocator: what it
would have reserved, when it would have tried again, what would have failed. Any run will do, of
the CPU too. Bounds only for --allocator async, since NVIDIA's pool isn't documented.

examples:
  memtrace replay infer.memtrace --conf expandable_segments:True
  memtrace replay infer.memtrace --device rtx-4090-24g -o on-4090.memtrace
  memtrace replay infer.memtrace --sweep        which settings are best
  memtrace replay infer.memtrace --verify       its own settings: is every event as recorded?
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrace.errors import MemtraceError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memtrace.allocator.requests import Requests
    from memtrace.allocator.settings import Settings
    from memtrace.allocator.simulation import Setup
    from memtrace.allocator.stream_ordered import Bounds
    from memtrace.allocator.sweep import Trial
    from memtrace.allocator.verify import Verified
    from memtrace.trace.reader import Trace

NAME = "replay"
HELP = "what another allocator, card or PyTorch would have made of a run"

_OWN = "as recorded"
_SIZED_BY = "--memory"
#: So wide that the longest setting of the grid isn't cut.
_WIDTH = 100


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="RUN", help="a run with allocations")
    parser.add_argument(
        "--allocator",
        choices=["native", "expandable", "async"],
        help="cudaMalloc'ed segments, ones that grow, or cudaMallocAsync (default: the run's)",
    )
    parser.add_argument(
        "--conf",
        metavar="STRING",
        action="append",
        default=[],
        help="PYTORCH_CUDA_ALLOC_CONF (default: the run's); again for another one to compare",
    )
    parser.add_argument("--torch", metavar="VERSION", help="whose rules (default: the run's)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--memory", metavar="SIZE", help="memory of the device, such as 24 GiB")
    where.add_argument("--device", metavar="NAME", help="a card of memtrace devices")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--sweep", action="store_true", help="try a grid of settings as well")
    what.add_argument(
        "--verify",
        action="store_true",
        help="replay under the run's own settings, and compare every event; exit 0 if all is equal",
    )
    what.add_argument(
        "-o", "--output", metavar="OUT", type=Path, help="write the replayed run to this folder"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document (docs/json.md)")


def run(args: argparse.Namespace) -> int:
    """Replay, and say what came of it.

    Raises:
        MemtraceError: the run can't be read or replayed, or a setting is wrong.
    """
    from memtrace.allocator.requests import version_of
    from memtrace.analysis.recorded import replayable, setup_of
    from memtrace.trace.folders import check_absent
    from memtrace.trace.reader import open_trace

    if args.output is not None:
        check_absent(args.output)
    trace = open_trace(args.path)
    if args.verify:
        return _verify(trace, args)
    requests = replayable(trace)
    one = requests[0]
    setup = _setup(args, setup_of(trace, one.process, one.device))
    if args.allocator == "async":
        return _bounds(trace, requests, setup, args)
    confs = _confs(args, setup, version_of(one.process) is not None)
    if args.output is not None and len(confs) > 1:
        raise MemtraceError("-o writes one run: give one --conf with it")
    if any(settings.backend != "native" for _, settings in confs):
        raise MemtraceError("cudaMallocAsync can't be replayed; --allocator async gives bounds")
    if args.output is not None:
        return _write(trace, requests, confs[0], args)
    return _compare(trace, requests, setup, confs, args)


def _setup(args: argparse.Namespace, setup: "Setup") -> "Setup":
    """The recorded device and version, or what the user names instead."""
    from memtrace.allocator.settings import parse_version
    from memtrace.analysis.what_if import on_card, with_memory
    from memtrace.devices import choose
    from memtrace.sizes import parse_size

    if args.torch is not None:
        setup = replace(setup, torch=parse_version(args.torch))
    if args.memory is not None:
        total = parse_size(args.memory)
        if total == 0:
            raise MemtraceError("a device without memory has no allocator")
        setup = with_memory(setup, total)
    if args.device is not None:
        card, *others = choose(args.device)
        if others:
            raise MemtraceError(f"--device takes one card, and {args.device!r} names several")
        setup = on_card(setup, card)
    return setup


def _confs(args: argparse.Namespace, setup: "Setup", known: bool) -> "list[tuple[str, Settings]]":
    """The settings to try, under the names that they are shown by; the run's own come first.

    ``known``: whether the run says which torch it had.
    """
    from memtrace.allocator.settings import Settings
    from memtrace.allocator.sweep import grid

    suffix = {"native": "expandable_segments:False", "expandable": "expandable_segments:True"}
    added = suffix.get(args.allocator, "")
    texts = [",".join(filter(None, (conf, added))) for conf in args.conf]
    own = [(_OWN, setup.settings)]
    if args.allocator and not texts:
        expandable = args.allocator == "expandable"
        if expandable != setup.settings.expandable:
            own.append((added, replace(setup.settings, expandable=expandable)))
    found = own + [(text, Settings.parse(text, setup.torch)) for text in texts]
    if args.output is not None and len(found) > 1:
        return found[1:]
    if args.sweep:
        found += [
            (one, Settings.parse(one, setup.torch)) for one in grid(setup.torch, setup.fraction)
        ]
    distinct: dict[Settings, str] = {}
    for text, settings in found:
        distinct.setdefault(settings, text)
    return [(text, settings) for settings, text in distinct.items()]


@contextmanager
def _bar(total: int, text: str) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal; what it yields takes how much was done since the last time."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(text, total=total)
        yield lambda done: progress.advance(task, done)


# -- settings compared -----------------------------------------------------------------------------


def _compare(
    trace: "Trace",
    requests: "Sequence[Requests]",
    setup: "Setup",
    confs: "Sequence[tuple[str, Settings]]",
    args: argparse.Namespace,
) -> int:
    from memtrace.allocator.sweep import PASSES, ranked, trials
    from memtrace.analysis.what_if import conditions

    one = requests[0]
    passes = PASSES * len(confs) * len(one.ops)
    with _bar(passes, f"{len(confs)} settings") as progress:
        found = trials(one, setup, confs, progress)
    order = ranked(found)
    notes = [*_others(requests), *conditions(one, setup, _SIZED_BY)]
    if args.json:
        print(json.dumps(_document(trace, one, setup, order, notes), indent=2))
        return 0
    from rich.console import Group

    from memtrace.render import show

    show(Group(_table(order), "", *_advice(order)), least=_WIDTH)
    for note in notes:
        print(note)
    return 0


def _table(order: "Sequence[Trial]") -> "RenderableType":
    from memtrace.render import grid, size

    table = grid(
        "smallest device",
        "reserved peak",
        "inactive split",
        "largest free",
        "retries",
        "failed",
        "settings",
        text=(6,),
    )
    for trial in order:
        one = trial.outcome
        table.add_row(
            "none" if trial.memory is None else size(trial.memory),
            size(one.reserved_peak),
            size(one.inactive_split_peak),
            size(one.largest_free),
            f"{one.retries:,}",
            f"{one.failures:,}",
            trial.conf.replace(",", ",\n") or "(none)",
        )
    return table


def _advice(order: "Sequence[Trial]") -> list[str]:
    """The best settings as a line for the shell, if they are better than the run's own."""
    if len(order) < 2:
        return []
    best = order[0]
    own = next(trial for trial in order if trial.conf == _OWN)
    if best.rank[:-1] >= own.rank[:-1]:
        return ["None of these is better than the run's own settings."]
    return [
        f"export PYTORCH_CUDA_ALLOC_CONF={shlex.quote(best.conf)}"
        if best.conf
        else "unset PYTORCH_CUDA_ALLOC_CONF"
    ]


def _others(requests: "Sequence[Requests]") -> list[str]:
    if len(requests) == 1:
        return []
    one = requests[0]
    return [
        f"Of {len(requests)} devices in the run this is {one.device} of process {one.process.pid}."
    ]


def _document(
    trace: "Trace",
    requests: "Requests",
    setup: "Setup",
    order: "Sequence[Trial]",
    notes: list[str],
) -> dict[str, Any]:
    from memtrace.allocator.simulation import ENDLESS

    return {
        "schema": 1,
        "run": str(trace.folder.resolve()),
        "pid": requests.process.pid,
        "device": requests.device,
        "torch": ".".join(map(str, setup.torch)),
        "total": None if setup.total == ENDLESS else setup.total,
        "outside": setup.outside,
        "fraction": setup.fraction,
        "operations": len(requests.ops),
        "trials": [
            {"settings": trial.conf, "smallest_memory": trial.memory, **asdict(trial.outcome)}
            for trial in order
        ],
        "notes": notes,
    }


# -- one run written -------------------------------------------------------------------------------


def _write(
    trace: "Trace",
    requests: "Sequence[Requests]",
    conf: "tuple[str, Settings]",
    args: argparse.Namespace,
) -> int:
    from memtrace.allocator.replay import write_replay
    from memtrace.analysis.recorded import setup_of
    from memtrace.analysis.what_if import conditions
    from memtrace.sizes import format_size

    text, settings = conf
    setups = [_setup(args, setup_of(trace, one.process, one.device)) for one in requests]
    if text != _OWN:
        setups = [replace(setup, settings=settings) for setup in setups]
    with _bar(sum(len(one.ops) for one in requests), "replay") as progress:
        outcomes = write_replay(trace, requests, setups, text, args.output, progress)
    each = zip(requests, setups, strict=True)
    found = (note for one, setup in each for note in conditions(one, setup, _SIZED_BY))
    notes = list(dict.fromkeys(found))
    if args.json:
        document = {
            "schema": 1,
            "run": str(args.output.resolve()),
            "devices": [
                {"pid": one.process.pid, "device": one.device, **asdict(outcome)}
                for one, outcome in zip(requests, outcomes, strict=True)
            ],
            "notes": notes,
        }
        print(json.dumps(document, indent=2))
        return 0
    for one, outcome in zip(requests, outcomes, strict=True):
        print(
            f"{args.output}: {one.device} of process {one.process.pid}: "
            f"{format_size(outcome.reserved_peak)} reserved at most, {outcome.retries} retries, "
            f"{outcome.failures} requests failed"
        )
    for note in notes:
        print(note)
    return 0


# -- bounds ----------------------------------------------------------------------------------------


def _bounds(
    trace: "Trace", requests: "Sequence[Requests]", setup: "Setup", args: argparse.Namespace
) -> int:
    from memtrace.allocator.stream_ordered import bounds
    from memtrace.analysis.what_if import conditions

    if args.output is not None or args.sweep or args.conf:
        raise MemtraceError("--allocator async gives bounds only: no -o, --sweep or --conf")
    one = requests[0]
    found = bounds(one, setup)
    notes = [*_others(requests), *conditions(one, setup, _SIZED_BY)]
    if args.json:
        document = {
            "schema": 1,
            "run": str(trace.folder.resolve()),
            "pid": one.process.pid,
            "device": one.device,
            "bounds": asdict(found),
            "notes": notes,
        }
        print(json.dumps(document, indent=2))
        return 0
    for line in (*_bounds_text(found), *notes):
        print(line)
    return 0


def _bounds_text(found: "Bounds") -> list[str]:
    from memtrace.sizes import format_size

    fits = {True: "fits", False: "doesn't fit", None: "may or may not fit"}[found.fits]
    return [
        f"requested at the peak  {format_size(found.requested_peak)}",
        f"reserved, lower bound  {format_size(found.least)}",
        f"reserved, upper bound  {format_size(found.most)}  (no memory passes between streams; the "
        "driver wastes none)",
        f"By these bounds it {fits}.",
    ]


# -- verification ----------------------------------------------------------------------------------


def _verify(trace: "Trace", args: argparse.Namespace) -> int:
    from memtrace.allocator.settings import parse_version
    from memtrace.allocator.verify import verify_run

    if args.conf or args.allocator or args.memory or args.device:
        raise MemtraceError(
            "--verify replays under the run's own settings: no --conf, --allocator, --memory or "
            "--device"
        )
    torch = None if args.torch is None else parse_version(args.torch)
    events = sum(len(process.events["id"]) for process in trace.processes)
    with _bar(events, "verify") as progress:
        found = verify_run(trace, torch, progress)
    equal = all(one.difference is None for one in found)
    if args.json:
        document = {
            "schema": 1,
            "run": str(trace.folder.resolve()),
            "equal": equal,
            "devices": [_verified_document(one) for one in found],
        }
        print(json.dumps(document, indent=2))
    else:
        for one in found:
            for line in _verified_text(one):
                print(line)
    return 0 if equal else 1


def _verified_document(one: "Verified") -> dict[str, Any]:
    return asdict(one) | {"torch": ".".join(map(str, one.torch))}


def _verified_text(one: "Verified") -> list[str]:
    torch = ".".join(map(str, one.torch))
    lines = [
        f"{one.device} of process {one.pid}: {one.equal:,} of {one.events:,} events equal, by the "
        f"rules of torch {torch}"
    ]
    if one.difference is not None:
        lines.append(f"first difference: {one.difference}")
    if one.reordered:
        lines.append(f"{one.reordered} segments went back in another order")
    if one.learnt:
        lines.append(
            f"{one.warm} blocks were there before the recording; which of their segments are older "
            f"was learnt from {one.learnt} choices"
        )
    return lines
