"""List the cards that --virtual-gpu takes: memtrace's catalogue and yours (docs/virtual_gpu.md)."""

import argparse
import json
from dataclasses import asdict

NAME = "devices"
HELP = "the cards that --virtual-gpu takes"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--json", action="store_true", help="every figure with its source, as JSON (docs/json.md)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the catalogue.

    Raises:
        MemtraceError: the user's own catalogue is wrong.
    """
    from memtrace.devices import catalogue
    from memtrace.render import grid, show, size

    devices = list(catalogue().values())
    if args.json:
        print(json.dumps({"schema": 1, "devices": [asdict(d) for d in devices]}, indent=2))
        return 0
    table = grid("card", "total", "capability", "SMs", "cuBLAS", "context")
    for device in devices:
        table.add_row(
            device.key,
            size(device.total),
            ".".join(map(str, device.capability)),
            str(device.processors),
            size(device.cublas_workspace),
            size(device.context),
        )
    show(table)
    return 0
