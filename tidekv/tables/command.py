"""The sub-command ``tidekv tables``: its options, and what it prints."""

import argparse
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from tidekv.errors import TidekvError

if TYPE_CHECKING:
    from rich.table import Table as Grid

    from tidekv.tables.measuring import Measured
    from tidekv.tables.memory import Found, Row, Setting, Table

#: Raised when a key of ``tables --json`` changes its meaning or goes away.
_SCHEMA = 1
#: The same of ``tables --persistent --json``.
_PERSISTENT_SCHEMA = 2

_EPILOG = """\
examples:
  tidekv tables
  tidekv tables --only accounting jetson --json
  tidekv tables --persistent
  tidekv tables --persistent --workload my-mix.jsonl -o runs
  memtrace stability runs/snapkv-native.memtrace

Columns: the paper's figure; as published, with what the authors' implementation appears to hold
(layer_major_published; SnapKV is transformers' own forward); ours (layer_major); as published less
the paper's; what verdicts leave of the card. GiB, or percent of SnapKV's that TideKV saves. Below
each table are the commands that plan its rows. docs/tables.md explains every difference.

exit status: 0 done, 2 bad input or no virtual card can be had, 130 interrupted, with what was
measured until then.
"""

_NAMES = {
    "snapkv": "SnapKV",
    "tidekv": "TideKV",
    "headinfer": "HeadInfer",
    "kivi": "KIVI",
    "keydiff": "KeyDiff",
}
_ALLOCATORS = {
    "": "native",
    "expandable_segments:True": "expandable",
    "backend:cudaMallocAsync": "async",
}
#: Columns that a table takes, at most.
_WIDE = 120


def add_tables(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the sub-command."""
    tables = commands.add_parser(
        "tables",
        help="the paper's memory results beside ours",
        description="Reproduce the paper's memory results on cards that aren't there.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tables.set_defaults(command=_tables)
    tables.add_argument(
        "--only",
        nargs="+",
        metavar="TABLE",
        default=[],
        help="accounting, attention, reserved, rtx-4090, ruler, jetson or mistral (default: all)",
    )
    tables.add_argument("--json", action="store_true", help="print one JSON object instead")
    study = tables.add_argument_group("the study of a persistent server")
    study.add_argument(
        "--persistent",
        action="store_true",
        help="instead: {native, async} x {SnapKV, TideKV}, 150 requests each in one process",
    )
    study.add_argument(
        "--workload",
        type=Path,
        metavar="FILE",
        help="other requests (default: those of traces/mixed-150.jsonl)",
    )
    study.add_argument("--requests", type=int, metavar="N", help="the first N only (default: 150)")
    study.add_argument("--card", help="default: a100-40g")
    study.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="keep the four runs there"
    )


def _tables(arguments: argparse.Namespace) -> None:
    if arguments.persistent:
        if arguments.only:
            raise TidekvError("--only is about tables of single prompts; drop --persistent.")
        _study(arguments)
        return
    for name in ("workload", "requests", "card", "output"):
        if getattr(arguments, name) is not None:
            raise TidekvError(f"--{name} is an option of the study; add --persistent.")
    _memory(arguments)


def _memory(arguments: argparse.Namespace) -> None:
    from memtrace.errors import MemtraceError
    from tidekv.progress import progress_bar
    from tidekv.tables import memory

    wanted = memory.tables(arguments.only)
    cases = memory.cases_of(wanted)
    found: dict[memory.Case, Measured] = {}
    try:
        with progress_bar("Prefills", total=len(cases)) as done:
            memory.measure(cases, found, done)
    except MemtraceError as error:
        raise TidekvError(f"{error}.") from error
    finally:
        if found and arguments.json:
            complete = len(found) == len(cases)
            body = {"schema": _SCHEMA, "complete": complete, **memory.as_json(wanted, found)}
            print(json.dumps(body, indent=2))
        elif found:
            _print(wanted, found)


def _print(wanted: "list[Table]", found: "Found") -> None:
    from memtrace.render import show

    for table in wanted:
        print(f"{table.name}: {table.title}\n")
        show(grid_of(table, found), least=_WIDE)
        print(_below(table))
    print(summary(wanted, found))


def grid_of(table: "Table", found: "Found") -> "Grid":
    """A line a row."""
    from memtrace.render import grid

    headers = ("", "allocator", "paper", "as published", "ours", "difference", "left", "")
    made = grid(*headers, text=(0, 1))
    numbers = _numbers(table)
    for row in table.rows:
        difference = row.difference(found)
        made.add_row(
            label(row),
            _ALLOCATORS[row.setting.allocator],
            ("process " if row.process else "") + _cell(row, row.paper),
            _cell(row, row.as_published(found)),
            _cell(row, row.ours(found)),
            "" if difference is None else f"{difference:+z.{_digits(row)}f}",
            _left(row, found),
            f"[{numbers[row.setting]}]",
        )
    return made


def label(row: "Row") -> str:
    """What a row is of."""
    at = row.setting
    length = f"{at.prompt >> 10} K" if at.prompt % 1024 == 0 else f"{at.prompt:,}"
    parts = [
        _NAMES[row.method],
        "" if at.selector == "snapkv" else at.selector,
        length,
        "" if at.attention == "fa2" else at.attention,
        "saves of" if row.saves else "",
        "" if row.quantity == "verdict" else row.quantity,
    ]
    return " ".join(filter(None, parts))


def _cell(row: "Row", value: float | bool | None) -> str:
    if value is None:
        return "-"
    if row.quantity == "verdict":
        return "fits" if value else "out of memory"
    return f"{value:.{_digits(row)}f}{' %' if row.saves else ''}"


def _left(row: "Row", found: "Found") -> str:
    """What a verdict leaves of the card."""
    left = row.left(found) if row.quantity == "verdict" else None
    return "" if left is None else f"{left / 2**30:.2f}"


def _digits(row: "Row") -> int:
    """As many as the paper has."""
    return 2 if row.saves else 3


def _numbers(table: "Table") -> "dict[Setting, int]":
    """Each setting has one command."""
    settings = dict.fromkeys(row.setting for row in table.rows)
    return {setting: number for number, setting in enumerate(settings, 1)}


def _below(table: "Table") -> str:
    """What is to be known of a table, and its commands."""
    from tidekv.tables import memory

    lines = textwrap.wrap(table.note, 100)
    for setting, number in _numbers(table).items():
        rows = (row for row in table.rows if row.setting == setting)
        methods = dict.fromkeys(method for row in rows for method in row.methods)
        lines.append(f"[{number}] {memory.command(setting, methods)}")
    return "\n" + "".join(f"{line}\n" for line in lines)


def summary(wanted: "list[Table]", found: "Found") -> str:
    """How far the column ``as published`` is the paper's."""
    from tidekv.tables.memory import WITHIN

    rows = [row for table in wanted for row in table.rows]
    said = []
    for verdicts, words in (
        (False, f"figures of allocated memory are within {WITHIN:.1%} of the paper's"),
        (True, "verdicts are the paper's"),
    ):
        judged = [row.agrees(found) for row in rows if (row.quantity == "verdict") == verdicts]
        known = [one for one in judged if one is not None]
        if known:
            said.append(f"{sum(known)} of {len(known)} {words}")
    return f"As published, {' and '.join(said) or 'there is nothing to compare with'}."


def _study(arguments: argparse.Namespace) -> None:
    from tidekv import workloads
    from tidekv.progress import progress_bar
    from tidekv.tables import persistent

    requests = 150 if arguments.requests is None else arguments.requests
    workloads.check_requests(requests)
    file, card = arguments.workload, arguments.card or "a100-40g"
    mix = persistent.describe(persistent.LENGTHS)
    if file is not None:
        requests = min(requests, len(workloads.load(file)))
        mix = f"requests of {file}"
    with progress_bar("Requests", total=4 * requests) as done:
        rows = persistent.run(
            file, card=card, requests=requests, output=arguments.output, done=done
        )
    if arguments.json:
        found = [row.as_json() for row in rows]
        body = {"schema": _PERSISTENT_SCHEMA, "mix": mix, "configurations": found}
        print(json.dumps(body, indent=2))
    else:
        print(persistent.table(rows, f"{requests} requests: {mix}", card))
