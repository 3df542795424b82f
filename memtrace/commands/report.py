"""Show where a run's bytes went: both accounting equations at the peak, and what stood there.

--at shows another instant instead, --request one request: at its own peak and right after it, what
the allocator said of itself then, and whether the state rebuilt from the events equals it.

examples:
  memtrace report served.memtrace --at 12.5s
  memtrace report served.memtrace --at event:4711
  memtrace report served.memtrace --request r0042 --json
"""

import argparse
import json
from typing import TYPE_CHECKING

from memtrace.errors import MemtraceError

if TYPE_CHECKING:
    from memtrace.trace.reader import Trace

NAME = "report"
HELP = "where a run's bytes went"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="RUN", help="a run made by memtrace record")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--at", metavar="WHEN", help="an instant: 1.25s, 1250ms or event:4711")
    chosen.add_argument("--request", metavar="N", help="a request, by name or number from 0")
    parser.add_argument("--json", action="store_true", help="print a JSON document (docs/json.md)")
    parser.add_argument(
        "--top", type=int, default=10, metavar="N", help="allocations to list (default: 10)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report.

    Raises:
        MemtraceError: the run is missing or damaged, ``--top`` is negative, or there is no such
            instant or request.
    """
    from memtrace.analysis.document import document
    from memtrace.analysis.summary import summarise
    from memtrace.render import report, show
    from memtrace.trace.reader import open_trace

    if args.top < 0:
        raise MemtraceError(f"--top {args.top} is no number of allocations; use 0 or more")
    trace = open_trace(args.path)
    if args.at is not None or args.request is not None:
        return _part(args, trace)
    summary = summarise(trace)
    if args.json:
        print(json.dumps(document(summary, args.top), indent=2))
    else:
        show(report(summary, args.top))
    return 0


def _part(args: argparse.Namespace, trace: "Trace") -> int:
    """Print one instant or one request."""
    from memtrace.analysis.accounts import accounts
    from memtrace.analysis.instants import answered, event_of, instant
    from memtrace.analysis.instants_document import instant_document, request_document
    from memtrace.analysis.process import process_memory
    from memtrace.inspected import inspected_instant, inspected_request
    from memtrace.render import show

    if args.request is not None:
        one = answered(trace, args.request)
        if args.json:
            print(json.dumps(request_document(trace, one, args.top), indent=2))
        else:
            show(inspected_request(trace, one, args.top))
        return 0
    found = sorted(
        (account for process in trace.processes for account in accounts(process)),
        key=lambda account: account.rank,
    )
    if not found:
        raise MemtraceError(f"{args.path} saw no tensor, so there is nothing at an instant")
    memory = process_memory(trace, found[0].process, found[0].device)
    chosen = instant(found[0], memory, event_of(found[0], args.at))
    if args.json:
        print(json.dumps(instant_document(trace, chosen, args.top), indent=2))
    else:
        show(inspected_instant(trace, chosen, args.top))
    return 0
