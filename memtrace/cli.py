"""The ``memtrace`` command."""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from memtrace import __version__
from memtrace.commands import (
    classify,
    compare,
    devices,
    explain,
    export,
    import_,
    record,
    replay,
    report,
    stability,
    view,
)
from memtrace.errors import MemtraceError
from memtrace.output import unwritten

_COMMANDS = (
    record,
    report,
    explain,
    compare,
    view,
    stability,
    replay,
    classify,
    import_,
    export,
    devices,
)

_EXAMPLES = """\
examples:
  memtrace record -- python infer.py           record a script
  memtrace report infer-4711.memtrace          where its bytes went
  memtrace explain infer-4711.memtrace         why it ran out of memory
  memtrace compare snapkv.memtrace tide.memtrace
  memtrace view snapkv.memtrace tide.memtrace  the same in a browser
  memtrace stability served.memtrace           whether memory stays put over requests
  memtrace replay infer-4711.memtrace --sweep  which allocator settings need the least memory
  memtrace import snapshot.pickle              what torch.cuda.memory._dump_snapshot() wrote
  memtrace classify infer-4711.memtrace --rules my.toml -o mine.memtrace
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="memtrace",
        description="Where each byte of a PyTorch program goes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"memtrace {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in _COMMANDS:
        command = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0 on success, 1 on bad data, 2 on wrong usage; ``record`` has its own."""
    args = _parser().parse_args(argv)
    if sys.stdout is None:  # closed by who started us
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except MemtraceError as error:
        if getattr(args, "json", False):
            print(json.dumps({"schema": 1, "error": str(error)}))
        print(f"memtrace: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        return unwritten(error)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
