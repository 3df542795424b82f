"""What ``/proc`` says of a process.

A process id names a process only while that lives: the id and the start time, in clock ticks since
the machine booted, name it for good.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")
_GONE = (FileNotFoundError, ProcessLookupError)


class Stat(NamedTuple):
    """One reading of a process."""

    parent: int
    start_ticks: int
    #: RSS in bytes. The kernel may batch the counter: a reading can be off by some pages for each
    #: CPU, and be 0 of a process that has just begun.
    rss: int
    #: Whether only its exit status is left.
    ended: bool


def stat(pid: int) -> Stat | None:
    """The process that has this id now; None if none has."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            # The name of the program stands in parentheses, and may hold some itself.
            fields = file.read().rpartition(b")")[2].split()
    except _GONE:
        return None
    return Stat(int(fields[1]), int(fields[19]), int(fields[21]) * _PAGE, fields[0] in b"ZX")


def resident(pid: int) -> int:
    """RSS of a process in bytes; 0 once it has ended."""
    found = stat(pid)
    return found.rss if found else 0


def high_water(pid: int) -> int:
    """Highest RSS that the program a process runs now ever had (VmHWM), in bytes; 0 if it ended."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            value = file.read().partition(b"VmHWM:")[2].split(maxsplit=1)
    except _GONE:
        return 0
    return int(value[0]) * 1024 if value else 0


def children(pid: int) -> Iterator[int]:
    """Children of every thread of a process; none where the kernel doesn't list them."""
    with suppress(*_GONE):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(*_GONE), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                yield from map(int, file.read().split())
