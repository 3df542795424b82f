"""Check files of golden vectors: does our allocator do what PyTorch's did?

Each stream of operations is done again, and every address, trace event and counter after every
operation compared. Of each stream that isn't equal the first difference is printed. Segments that
one operation gives back may come in another order. The format is described in
memtrace/allocator/vectors.py.

example:
  python -m memtrace.allocator tests/allocator/golden/*.jsonl.gz
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from memtrace.allocator.golden import compare
from memtrace.allocator.vectors import VectorError, read
from memtrace.output import unwritten


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every stream of every file is equal, 1 if not, 2 on wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m memtrace.allocator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help=".jsonl or .jsonl.gz")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    args = parser.parse_args(argv)
    try:
        return _run(args.files, args.json)
    except OSError as error:
        return unwritten(error)
    except KeyboardInterrupt:
        return 130


def _run(paths: Sequence[Path], as_json: bool) -> int:
    checked = []
    for path in paths:
        checked.append(_check(path))
        if not as_json:
            _show(checked[-1])
    streams = sum(one["streams"] for one in checked)
    equal = sum(one["equal"] for one in checked)
    if as_json:
        document = {"schema": 1, "streams": streams, "equal": equal, "files": checked}
        print(json.dumps(document, indent=2))
    else:
        print(f"{equal} of {streams} streams equal", flush=True)
    return int(equal < streams or any(one["error"] for one in checked))


def _check(path: Path) -> dict[str, Any]:
    """What a file's streams came to; ``error``: why they aren't all there."""
    differences: list[dict[str, Any]] = []
    streams = 0
    error = None
    try:
        with _opened(path) as file:
            for line, vector in read(path, file):
                streams += 1
                if difference := compare(vector):
                    about = {"line": line, "torch": vector.torch, "settings": vector.conf}
                    differences.append(about | asdict(difference))
    except VectorError as problem:
        error = str(problem)
    return {
        "file": str(path),
        "streams": streams,
        "equal": streams - len(differences),
        "differences": differences,
        "error": error,
    }


def _show(file: Mapping[str, Any]) -> None:
    for one in file["differences"]:
        conf = f", {one['settings']}" if one["settings"] else ""
        print(
            f"{file['file']}, line {one['line']} (torch {one['torch']}{conf}):"
            f" operation {one['operation']}, {one['description']}: {one['what']}:"
            f" expected {one['expected']}, found {one['found']}"
        )
    if file["error"]:
        print(f"memtrace: {file['error']}", file=sys.stderr)


def _opened(path: Path) -> AbstractContextManager[IO[bytes]]:
    """The file, with a bar on a terminal that shows how far it is read.

    Raises:
        VectorError: it can't be opened.
    """
    try:
        if not sys.stderr.isatty():
            return path.open("rb")
        from rich.console import Console
        from rich.progress import open as watch

        console = Console(stderr=True)
        return watch(path, "rb", description=path.name, console=console, transient=True)
    except OSError as error:
        raise VectorError(f"{path} can't be read: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
