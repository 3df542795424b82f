"""Why no recorder started in a process that was seen from outside."""

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from memtrace.record import child

#: Names of Python interpreters; a program that embeds one has another name.
_PYTHON = re.compile(r"(python|pypy)[\d.]*t?d?")
#: Options of Python that keep a recorder out: without the environment, or without ``site``.
_CLOSED = "IES"
#: Options that take the rest of their word or the next one.
_WITH_VALUE = "WX"
#: Options after which the program's own arguments begin.
_LAST = "cm"


class Reason(NamedTuple):
    """Why a process isn't recorded; None: unknown."""

    python: bool | None
    text: str | None


UNKNOWN = Reason(None, None)
#: A fork that never ran a program of its own: of code that isn't Python, or seen before its exec.
COPY = Reason(
    None, "a copy of its parent: forked by code that isn't Python, or ended before it ran a program"
)


def command_line(pid: int) -> list[str]:
    """Program and arguments of a process; empty once it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
            words = file.read().split(b"\0")
    except OSError:
        return []
    return [os.fsdecode(word) for word in words[:-1]]


def why(pid: int, argv: Sequence[str]) -> Reason:
    """Why ``pid`` can't be recorded, as far as can be told while it lives."""
    try:
        program = os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")
    except OSError:
        return UNKNOWN
    if not _PYTHON.fullmatch(os.path.basename(program)):
        return Reason(False, "not Python")
    inner = inner_id(pid)
    if inner is not None:
        return Reason(True, f"it has another process id, {inner}, in a namespace of its own")
    option = closing_option(argv)
    if option is not None:
        return Reason(True, f"Python with {option}, which keeps the recorder out")
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            names = {word.partition(b"=")[0] for word in file.read().split(b"\0")}
    except OSError:
        return Reason(True, None)
    if not {child.RUN.encode(), b"PYTHONPATH"} <= names:
        return Reason(True, "Python with another environment, so that nothing told it of the run")
    return Reason(True, None)


def inner_id(pid: int) -> int | None:
    """The id that a process sees of itself where that is another one, as in a container."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            ids = file.read().partition(b"NSpid:")[2].partition(b"\n")[0].split()
    except OSError:
        return None
    return int(ids[-1]) if len(ids) > 1 else None


def closing_option(argv: Sequence[str]) -> str | None:
    """The option of a Python command line that keeps a recorder out: ``-I``, ``-E`` or ``-S``."""
    words = iter(argv[1:])
    for word in words:
        if word == "--check-hash-based-pycs":
            next(words, None)
        if not word.startswith("-") or word == "-":
            return None
        if word.startswith("--"):
            continue
        for position, letter in enumerate(word[1:], start=1):
            if letter in _CLOSED:
                return f"-{letter}"
            if letter in _LAST:
                return None
            if letter in _WITH_VALUE:
                if position == len(word) - 1:
                    next(words, None)
                break
    return None
