"""Compare runs with the first one, component by component."""

import argparse
import json

NAME = "compare"
HELP = "what differs between runs"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("first", metavar="RUN", help="the run that the others are compared with")
    parser.add_argument("others", metavar="RUN", nargs="+", help="the other runs")
    parser.add_argument("--json", action="store_true", help="print a JSON document (docs/json.md)")


def run(args: argparse.Namespace) -> int:
    """Print the comparison.

    Raises:
        MemtraceError: a run is missing, damaged or saw no tensor.
    """
    from memtrace.analysis.compare import compare
    from memtrace.analysis.document import comparison_document
    from memtrace.analysis.summary import summarise
    from memtrace.render import comparison, show
    from memtrace.trace.reader import open_trace

    found = compare([summarise(open_trace(path)) for path in (args.first, *args.others)])
    if args.json:
        print(json.dumps(comparison_document(found), indent=2))
    else:
        show(comparison(found))
    return 0
