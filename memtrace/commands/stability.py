"""Say whether memory stays where it is over the requests of a persistent process.

After the warm-up a robust slope (Theil and Sen's, with its confidence interval) of what is
allocated, reserved and held by the process after each request is compared with --slope: `plateau`
when it is surely within, `growing` when it is surely above, with what grows, else `undecided`, with
how many more requests would decide. Requests are those of memtrace.scopes.request(); prompts of one
length are compared with each other. docs/stability.md says how.

exit status: 0 plateau, 3 growing, 4 undecided, 1 no such run or no requests in it, 2 wrong usage.

examples:
  memtrace record --source none -o served.memtrace -- python server.py
  memtrace stability served.memtrace --slope "1 MiB/100 requests"
"""

import argparse
import json

from memtrace.errors import MemtraceError
from memtrace.sizes import STEADY

NAME = "stability"
HELP = "whether memory stays where it is over a process's requests"

#: The worst verdict first.
_EXIT = {"growing": 3, "undecided": 4, "plateau": 0}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="RUN", help="a run made by memtrace record")
    parser.add_argument(
        "--warmup-cycles",
        type=int,
        default=1,
        metavar="N",
        help="how often each prompt length comes before requests count (default: 1)",
    )
    parser.add_argument(
        "--slope",
        default=STEADY,
        metavar="RATE",
        help=f"growth that still counts as none (default: {STEADY})",
    )
    parser.add_argument(
        "--rss",
        action="store_true",
        help="judge a process's resident set too, which moves by itself (NVML's always is)",
    )
    parser.add_argument(
        "--top", type=int, default=5, metavar="N", help="growing allocations to list (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document (docs/json.md)")


def run(args: argparse.Namespace) -> int:
    """Print the verdict; the exit code says it too.

    Raises:
        MemtraceError: the run is missing or damaged, names no request, or a number can't be.
    """
    from memtrace.analysis.boundaries import served
    from memtrace.analysis.persistence import persistence
    from memtrace.analysis.stability_document import stability_document
    from memtrace.render import show
    from memtrace.sizes import parse_rate
    from memtrace.steadiness import steadiness
    from memtrace.trace.reader import open_trace

    for name in ("warmup_cycles", "top"):
        if getattr(args, name) < 0:
            option = "--" + name.replace("_", "-")
            raise MemtraceError(f"{option} {getattr(args, name)} is too few; use 0 or more")
    try:
        limit = parse_rate(args.slope)
    except MemtraceError as error:
        raise MemtraceError(f"--slope: {error}") from None
    trace = open_trace(args.path)
    found = [
        persistence(one, limit=limit, warmup_cycles=args.warmup_cycles, rss=args.rss)
        for one in served(trace)
    ]
    if not found:
        raise MemtraceError(
            f"{args.path} has no requests; name them with memtrace.scopes.request(), as tidekv does"
        )
    if args.json:
        print(json.dumps(stability_document(trace, found, args.top), indent=2))
    else:
        show(steadiness(trace, found, args.top))
    verdicts = {str(one.verdict) for one in found}
    return next(code for verdict, code in _EXIT.items() if verdict in verdicts)
