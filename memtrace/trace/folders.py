"""A run that is made from other things than a recording: as a whole, or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memtrace.errors import MemtraceError


def check_absent(path: Path) -> None:
    """Refuse to make a run where something is.

    Raises:
        MemtraceError: something is there.
    """
    if path.exists() or path.is_symlink():
        raise MemtraceError(f"{path} is there already; remove it or name another run with -o")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a run at ``path`` as a whole, or not at all.

    Yields:
        a folder beside it, which takes its name when the block ends.

    Raises:
        MemtraceError: something is there, or nothing can be written there.
    """
    check_absent(path)
    scratch = path.with_name(f".{path.name}.part")
    try:
        scratch.mkdir()
    except FileExistsError:
        raise MemtraceError(f"{scratch} is in the way: remove it, unless it grows now") from None
    except OSError as error:
        raise MemtraceError(f"{path} can't be made: {error.strerror}") from None
    try:
        yield scratch
        scratch.rename(path)
    except OSError as error:
        raise MemtraceError(f"{path} can't be written: {error.strerror}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
