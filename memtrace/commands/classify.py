"""Give a recorded run other components, by rules of your own (docs/rules.md).

The run stays as it is; the result is a new one with the same events. Components that your code
chose itself, with memtrace.scopes, win over every rule.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memtrace.classify.runs import Hit

NAME = "classify"
HELP = "apply rules of your own to a run"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="RUN", help="a run made by memtrace record")
    parser.add_argument(
        "--rules", metavar="FILE", type=Path, required=True, help="a TOML file of rules"
    )
    parser.add_argument(
        "-o", "--output", metavar="OUT", type=Path, required=True, help="folder to make"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document (docs/json.md)")


def run(args: argparse.Namespace) -> int:
    """Write the new run and say what each rule matched.

    Raises:
        MemtraceError: the run or the rules can't be read, or the new run exists.
    """
    from memtrace.classify.rules import load_rules
    from memtrace.classify.runs import classify

    hits = classify(args.path, load_rules(args.rules), args.output)
    if args.json:
        document = {
            "schema": 1,
            "run": str(args.output.resolve()),
            "rules": [hit.document() for hit in hits],
        }
        print(json.dumps(document, indent=2))
    else:
        _show(hits)
    return 0


def _show(hits: "list[Hit]") -> None:
    from rich.console import Group

    from memtrace.render import grid, show, size

    table = grid("rule", "component", "allocations and retags", "bytes allocated", text=(0, 1))
    for hit in hits:
        if hit.events:
            row = (hit.rule.title, hit.rule.component, f"{hit.events:,}", size(hit.bytes))
            table.add_row(*row)
    nothing = [f"{hit.rule.title} matches nothing" for hit in hits if not hit.events]
    show(Group(*([table] if table.row_count else []), *nothing))
