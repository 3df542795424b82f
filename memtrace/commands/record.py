"""Run a command and record where each byte of its Python processes goes.

The command needs no change: the recorder starts inside each Python process before the user's code
and begins with the import of torch. Children are followed, whatever starts them.

exit status:
  the command's own, or 128+n if signal n killed it
  2    wrong usage
  123  the command succeeded, but no recorder could start in it: it is not Python, or Python with
       -I, -E or -S (the trace then holds process memory only), or torch can't be recorded there
  125  memtrace record itself failed, as when the output exists
  126  the command was found but can't be run
  127  the command was not found
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memtrace.errors import MemtraceError

if TYPE_CHECKING:
    from memtrace.virtual_gpu.launch import VirtualGpu

NAME = "record"
HELP = "run a command and record its memory"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.usage = (
        f"{parser.prog} [-o RUN] [--force] [--virtual-gpu CARD] [--stacks N] [--source S] "
        "[--interval MS] [--rules FILE] [-q | --json] -- COMMAND…"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="RUN",
        type=Path,
        help="folder to make (default: SCRIPT-PID.memtrace in the working directory)",
    )
    parser.add_argument("--force", action="store_true", help="replace a run that is there")
    parser.add_argument(
        "--virtual-gpu",
        metavar="CARD",
        help="run on a card that isn't there, such as a100-40g or 2×h100-80g: memory is PyTorch's "
        "own, nothing is computed (see memtrace devices, docs/virtual_gpu.md)",
    )
    parser.add_argument(
        "--stacks",
        metavar="N",
        type=_at_least(0),
        default=0,
        help="Python frames to keep for each allocation (default: 0)",
    )
    parser.add_argument(
        "--source",
        choices=("auto", "tensors", "none"),
        default="auto",
        help="auto reads the history of CUDA's allocator once CUDA is used, tensors books what "
        "operators return on any device, none only asks CUDA's allocator after each request, which "
        "costs next to nothing (default: auto)",
    )
    parser.add_argument(
        "--interval",
        metavar="MS",
        type=_at_least(1),
        default=20,
        help="milliseconds between samples of process memory (default: 20)",
    )
    parser.add_argument(
        "--rules",
        metavar="FILE",
        type=Path,
        help="a TOML file of rules to classify the run by, once it is over (docs/rules.md)",
    )
    said = parser.add_mutually_exclusive_group()
    said.add_argument("-q", "--quiet", action="store_true", help="don't say where the trace is")
    said.add_argument("--json", action="store_true", help="say it as JSON, on stderr")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _at_least(least: int) -> "argparse._ActionType":
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    parse.__name__ = "number"  # argparse names it where int() fails
    return parse


def run(args: argparse.Namespace) -> int:
    """Record; the exit code is the command's unless something of ours failed."""
    from memtrace.record.launcher import record

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    return record(
        command,
        args.output,
        force=args.force,
        stacks=args.stacks,
        source=args.source,
        interval_ms=args.interval,
        quiet=args.quiet,
        as_json=args.json,
        finish=_classifier(args.rules) if args.rules else None,
        virtual_gpu=None if args.virtual_gpu is None else _virtual_gpu(args.virtual_gpu, command),
    )


def _virtual_gpu(cards: str, command: Sequence[str]) -> "VirtualGpu":
    """The cards, ready to be used; what can't be is refused before anything runs."""
    from memtrace.devices import choose
    from memtrace.record.launcher import FAILED, USAGE, LaunchError
    from memtrace.virtual_gpu.launch import prepare

    code = USAGE
    try:
        devices = choose(cards)
        code = FAILED
        return prepare(devices, command)
    except MemtraceError as error:
        raise LaunchError(str(error), code) from None


def _classifier(path: Path) -> Callable[[Path], list[str]]:
    """What applies a file of rules to a run; a wrong file is refused before anything runs."""
    from memtrace.classify.rules import load_rules
    from memtrace.classify.runs import classify_in_place
    from memtrace.record.launcher import FAILED, LaunchError

    try:
        rules = load_rules(path)
    except MemtraceError as error:
        raise LaunchError(str(error), FAILED) from None

    def apply(run: Path) -> list[str]:
        hits = classify_in_place(run, rules)
        return [f"{hit.rule.title} matches nothing" for hit in hits if not hit.events]

    return apply
