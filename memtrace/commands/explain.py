"""Say why a run ran out of memory: what held it, why there was no room, and what would help.

Of a run without a failure it says what the allocator held for nothing when it held most. Of a log,
or of text on stdin (-), it reads PyTorch's own out-of-memory messages, and says what they tell and
what they don't. docs/fragmentation.md defines the terms.
"""

import argparse
import json
import sys
from pathlib import Path

from memtrace.errors import MemtraceError

NAME = "explain"
HELP = "why a run ran out of memory, and what would help"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "path", metavar="RUN|LOGFILE", help="a run, or text with messages of PyTorch; - for stdin"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document (docs/json.md)")
    parser.add_argument(
        "--top", type=int, default=10, metavar="N", help="blocks to list (default: 10)"
    )
    parser.add_argument(
        "--no-replay", action="store_true", help="don't try other allocator settings"
    )


def run(args: argparse.Namespace) -> int:
    """Print the explanation.

    Raises:
        MemtraceError: the run or log is missing or damaged, or has nothing to explain.
    """
    if args.top < 0:
        raise MemtraceError(f"--top {args.top} is no number of blocks; use 0 or more")
    if _is_log(args.path):
        return _explain_log(args)
    from memtrace.analysis.document import explanation_document
    from memtrace.analysis.explanation import explain
    from memtrace.explained import explanation
    from memtrace.render import show
    from memtrace.trace.reader import open_trace

    found = explain(open_trace(args.path), replay=not args.no_replay, progress=_tell)
    if args.json:
        print(json.dumps(explanation_document(found, args.top), indent=2))
    else:
        show(explanation(found, args.top))
    return 0


def _is_log(path: str) -> bool:
    """Whether it is no folder, as runs are; of what can't be found the reader of runs tells."""
    try:
        return path == "-" or (Path(path).exists() and not Path(path).is_dir())
    except OSError:
        return False


def _explain_log(args: argparse.Namespace) -> int:
    from memtrace.explained import messages
    from memtrace.interchange.oom_message import messages_document, read_log
    from memtrace.render import show

    name = "stdin" if args.path == "-" else args.path
    found = read_log(args.path)
    if args.json:
        print(json.dumps(messages_document(name, found), indent=2))
    else:
        show(messages(name, found))
    return 0


def _tell(settings: str, left: int) -> None:
    """On a terminal, what is being tried: a line that the next one overwrites."""
    if sys.stderr.isatty():
        text = f"replaying {settings[:60]} ({left} to go)" if left else ""
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
