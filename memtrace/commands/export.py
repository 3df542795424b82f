"""Write a run in another tool's format.

torch-snapshot: the pickle of torch.cuda.memory._dump_snapshot(), for python -m
torch.cuda._memory_viz and pytorch.org/memory_viz. Components and scopes are its user_metadata;
memtrace import makes the same run of it again (docs/snapshots.md).
"""

import argparse
import json
from pathlib import Path

NAME = "export"
HELP = "write a run as a PyTorch memory snapshot"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run_path", metavar="RUN", type=Path, help="a run with CUDA memory")
    parser.add_argument("--to", metavar="FORMAT", choices=["torch-snapshot"], required=True)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="file to write (default: RUN.pickle in the working directory)",
    )
    parser.add_argument("--pid", type=int, help="which process (default: the only one with CUDA)")
    parser.add_argument("--json", action="store_true", help="print a JSON document (docs/json.md)")


def run(args: argparse.Namespace) -> int:
    """Export, and say what came of it.

    Raises:
        MemtraceError: the run is missing, damaged or without CUDA memory, or the file is there.
    """
    from memtrace.interchange.exporter import export_snapshot
    from memtrace.trace.reader import open_trace

    trace = open_trace(args.run_path)
    made = export_snapshot(trace, args.output or Path(f"{trace.name}.pickle"), args.pid)
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
