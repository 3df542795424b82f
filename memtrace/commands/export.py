"""Write runs in another format.

torch-snapshot: the pickle of torch.cuda.memory._dump_snapshot(), for python -m
torch.cuda._memory_viz and pytorch.org/memory_viz, of one run. Components and scopes are its
user_metadata; memtrace import makes the same run of it again (docs/snapshots.md).

html: one page for a browser, of up to 8 runs beside each other, that needs neither a server nor a
network: the viewer's overview, timeline and fragmentation (docs/viewer.md).

examples:
  memtrace export infer.memtrace --to torch-snapshot
  memtrace export snapkv.memtrace tide.memtrace --to html -o both.html
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memtrace.errors import MemtraceError

if TYPE_CHECKING:
    from memtrace.trace.reader import Trace

NAME = "export"
HELP = "write runs as a PyTorch memory snapshot or as a page"

_SUFFIXES = {"torch-snapshot": ".pickle", "html": ".html"}
_MOST = 8  # runs on a page


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="runs made by memtrace record")
    parser.add_argument("--to", metavar="FORMAT", choices=list(_SUFFIXES), required=True)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="file to write (default: the first RUN.pickle or RUN.html in the working directory)",
    )
    parser.add_argument(
        "--pid",
        type=int,
        help="which process a snapshot is of (default: the only one with CUDA)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document (docs/json.md)")


def run(args: argparse.Namespace) -> int:
    """Export, and say what came of it.

    Raises:
        MemtraceError: a run is missing, damaged or has nothing to export, there are too many, or
            the file is there or can't be written.
    """
    from memtrace.trace.reader import open_trace

    traces = [open_trace(path) for path in args.runs]
    file = args.output or Path(f"{traces[0].name}{_SUFFIXES[args.to]}")
    if args.to == "html":
        return _page(args, traces, file)
    if len(traces) > 1:
        raise MemtraceError(f"a snapshot is of one run, and {len(traces)} are given")
    return _snapshot(args, traces[0], file)


def _snapshot(args: argparse.Namespace, trace: "Trace", file: Path) -> int:
    from memtrace.interchange.exporter import export_snapshot

    made = export_snapshot(trace, file, args.pid)
    if args.json:
        document = {
            "schema": 1,
            "file": str(made.file.resolve()),
            "pid": made.pid,
            "devices": list(made.devices),
            "entries": made.entries,
            "left_out": list(made.left_out),
        }
        print(json.dumps(document, indent=2))
        return 0
    print(f"{made.file}: {made.entries:,} entries of {', '.join(made.devices)}")
    for text in made.left_out:
        print(f"left out: {text}")
    return 0


def _page(args: argparse.Namespace, traces: Sequence["Trace"], file: Path) -> int:
    from memtrace.analysis.summary import summarise
    from memtrace.commands.view import need
    from memtrace.sizes import format_size

    need("plotly", "pandas")
    from app.offline import page

    if args.pid is not None:
        raise MemtraceError("--pid chooses the process of a snapshot; a page has no such choice")
    if len(traces) > _MOST:
        raise MemtraceError(f"a page shows up to {_MOST} runs, and {len(traces)} are given")
    if file.exists():
        raise MemtraceError(f"{file} is there already; remove it or name another with -o")
    text = page([summarise(trace) for trace in traces])
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MemtraceError(f"{file} can't be written: {error.strerror}") from None
    size = file.stat().st_size
    names = [trace.name for trace in traces]
    if args.json:
        document = {"schema": 1, "file": str(file.resolve()), "runs": names, "bytes": size}
        print(json.dumps(document, indent=2))
    else:
        print(f"{file}: {', '.join(names)}, {format_size(size)}")
    return 0
