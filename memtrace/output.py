"""What commands do where their output has nowhere to go."""

import os
import sys
from contextlib import suppress


def unwritten(error: OSError) -> int:
    """What it means that our output has nowhere to go: the exit status.

    Raises:
        OSError: it is about a file that isn't our output.
    """
    if error.filename is not None:
        raise error
    # The interpreter writes what is left at its end; it must not fail again.
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):  # the reader went away, as `head` does
        print(f"memtrace: the output can't be written: {error.strerror}", file=sys.stderr)
    return 1
