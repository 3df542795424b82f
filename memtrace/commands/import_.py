"""Make a run of a snapshot of PyTorch's allocator, as torch.cuda.memory._dump_snapshot() writes it.

Snapshots of torch 2.1 to 2.15 are read, without running anything that is in them. What a snapshot
doesn't tell is listed in the run (docs/snapshots.md).
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

NAME = "import"
HELP = "make a run of a PyTorch memory snapshot"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("snapshot", metavar="SNAPSHOT", type=Path, help="a .pickle file")
    parser.add_argument(
        "-o",
        "--output",
        metavar="RUN",
        type=Path,
        help="folder to make (default: SNAPSHOT.memtrace in the working directory)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document (docs/json.md)")


def run(args: argparse.Namespace) -> int:
    """Import, and say what came of it.

    Raises:
        MemtraceError: it is no snapshot or damaged, or the run can't be made.
    """
    from memtrace.interchange.importer import import_snapshot
    from memtrace.trace import SUFFIX

    target = args.output or Path(args.snapshot.stem + SUFFIX)
    made = import_snapshot(args.snapshot, target, _watch)
    if args.json:
        document = {
            "schema": 1,
            "run": str(made.run.resolve()),
            "devices": list(made.devices),
            "entries": made.entries,
            "events": made.events,
            "impossible": made.impossible,
            "unseen": list(made.unseen),
        }
        print(json.dumps(document, indent=2))
        return 0
    devices = ", ".join(made.devices) or "no device"
    print(f"{made.run}: {made.events:,} events from {made.entries:,} entries of {devices}")
    for text in made.unseen:
        print(f"not known: {text}")
    return 0


def _watch(entries: Sequence[Any], device: str) -> Iterable[Any]:
    """``entries`` with a bar on a terminal that shows how far they are."""
    if not sys.stderr.isatty():
        return entries
    from rich.console import Console
    from rich.progress import track

    return track(entries, device, console=Console(stderr=True), transient=True)
