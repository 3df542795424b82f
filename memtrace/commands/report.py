"""Show where a run's bytes went: both accounting equations at the peak, and what stood there."""

import argparse
import json

from memtrace.errors import MemtraceError

NAME = "report"
HELP = "where a run's bytes went"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="RUN", help="a run made by memtrace record")
    parser.add_argument("--json", action="store_true", help="print a JSON document (docs/json.md)")
    parser.add_argument(
        "--top", type=int, default=10, metavar="N", help="allocations to list (default: 10)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report.

    Raises:
        MemtraceError: the run is missing or damaged, or ``--top`` is negative.
    """
    from memtrace.analysis.document import document
    from memtrace.analysis.summary import summarise
    from memtrace.render import report, show
    from memtrace.trace.reader import open_trace

    if args.top < 0:
        raise MemtraceError(f"--top {args.top} is no number of allocations; use 0 or more")
    summary = summarise(open_trace(args.path))
    if args.json:
        print(json.dumps(document(summary, args.top), indent=2))
    else:
        show(report(summary, args.top))
    return 0
