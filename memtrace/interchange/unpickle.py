"""Read a pickle as data: no code of it runs, and it takes no more memory than its size explains.

Python's unpickler does what a file says. Before it sees one, the whole file is matched against the
opcodes that ``torch.cuda.memory._dump_snapshot`` and Python's own pickler write for dicts, lists,
strings and numbers. That leaves out every opcode that imports or calls something, the text forms
of protocol 0, strings longer than the file, memo numbers that would make the memo outgrow it, and
nested tuples, whose hash could overflow the stack.
"""

import gc
import io
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memtrace.errors import MemtraceError
from memtrace.sizes import format_size

#: ``PROTO`` and a protocol that snapshots are written in.
_FIRST = re.compile(rb"\x80[\x02-\x05]", re.DOTALL)
#: An integer: BININT1, BININT2, BININT, or LONG1 with what 64 bits and a sign need.
_INTEGER = b"(?:K.|M..|J....|\\x8a(?:%b))" % b"|".join(
    b"\\x%02x.{%d}" % (length, length) for length in range(10)
)
#: Opcodes with an argument of known length, the frequent ones first: LONG_BINGET, BINGET; NONE
#: NEWTRUE NEWFALSE MARK EMPTY_DICT EMPTY_LIST EMPTY_TUPLE SETITEM SETITEMS APPEND APPENDS MEMOIZE;
#: BINPUT, BINFLOAT, FRAME; SHORT_BINUNICODE of up to three bytes.
_FIXED = rb"j....|h.|[N\x88\x89(}\])suae\x94]|q.|G.{8}|\x95.{8}|\x8c(?:\x00|\x01.|\x02..|\x03...)"
#: Lengths in bytes of the length of a string: BINUNICODE, BINUNICODE8, BINBYTES, BINBYTES8.
_LONG_STRINGS = {b"X": 4, b"\x8d": 8, b"B": 4, b"\x8e": 8}
#: SHORT_BINUNICODE, SHORT_BINBYTES: one byte says how long.
_SHORT_STRINGS = (b"\x8c", b"C")

#: Bytes that a dict or list takes at least, when it is empty.
_CONTAINER_BYTES = 72
#: Bytes in memory for a byte of the file, containers excepted: a stack slot for an opcode of one.
_EXPANSION = 8

_NOT_DATA = (
    "is not a snapshot: it holds more than dicts, lists, strings and numbers, which are all that "
    "memtrace unpickles"
)


def read_pickle(path: Path) -> tuple[Any, int]:
    """What a pickle holds, and its size in bytes.

    Raises:
        MemtraceError: it can't be read, isn't a pickle of plain data, is truncated, or would need
            more memory than there is.
    """
    try:
        if not path.is_file():
            raise MemtraceError(f"{path} is not a file" if path.exists() else f"{path} isn't there")
        _check_memory(path, path.stat().st_size, 0)
        data = path.read_bytes()
    except OSError as error:
        raise MemtraceError(f"{path} can't be read: {error.strerror}") from None
    _check_memory(path, len(data), data.count(b"}") + data.count(b"]"))
    _check_opcodes(path, data)
    try:
        with without_collections():
            return _Plain(io.BytesIO(data)).load(), len(data)
    except MemoryError:
        raise MemtraceError(f"{path} needs more memory than this machine has") from None
    except Exception:  # whatever the unpickler finds wrong with it
        raise MemtraceError(f"{path} is damaged: it is no whole pickle") from None


def _check_memory(path: Path, size: int, containers: int) -> None:
    """Refuse a file of ``size`` bytes with at most so many containers if it can't fit.

    Raises:
        MemtraceError: it needs more than the free memory.
    """
    needed = size * _EXPANSION + containers * _CONTAINER_BYTES
    free = _free_memory()
    if needed > free:
        raise MemtraceError(
            f"{path} needs up to {format_size(needed)} of memory and {format_size(free)} are free"
        )


def _free_memory() -> int:
    """Bytes that can be had without swapping, as the kernel estimates them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvail"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_opcodes(path: Path, data: bytes) -> None:
    """Match the file against the opcodes of plain data, up to its STOP."""
    if not _FIRST.match(data):
        raise MemtraceError(
            f"{path} is not a snapshot: it doesn't begin like a pickle of protocol 2 to 5"
        )
    run = _plain_run(len(data))
    at = 2
    while True:
        found = run.match(data, at)
        at = found.end() if found else at
        code = data[at : at + 1]
        if code == b".":
            return
        if code in _SHORT_STRINGS:
            at += 2 + data[at + 1] if at + 1 < len(data) else 2
        elif code in _LONG_STRINGS:
            width = _LONG_STRINGS[code]
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
        elif len(data) - at < _LONGEST:
            raise MemtraceError(f"{path} is truncated: the pickle in it has no end")
        else:
            raise MemtraceError(f"{path} {_NOT_DATA}")
        if at >= len(data):
            raise MemtraceError(f"{path} is truncated: the pickle in it has no end")


#: Bytes of the longest thing in a run: two integers, each with a FRAME behind, and TUPLE2.
_LONGEST = 41


def _plain_run(size: int) -> re.Pattern[bytes]:
    """Any number of opcodes that aren't strings, for a file of ``size`` bytes.

    A memo number above the file's size, rounded up, isn't matched: the memo is an array.
    """
    top = max(size - 1, 0).to_bytes(8, "little")
    allowed = max((place for place in range(4) if top[place]), default=0)
    number = b"".join(
        b"." if place < allowed else _up_to(top[place]) if place == allowed else b"\\x00"
        for place in range(4)
    )
    # A tuple is made of two integers only; a FRAME may stand behind each.
    frame = rb"(?:\x95.{8})?"
    numbers = rb"%b(?:%b%b%b\x86)?" % (_INTEGER, frame, _INTEGER, frame)
    one = rb"(?:%b|%b|r%b)" % (_FIXED, numbers, number)
    return re.compile(one + rb"*+", re.DOTALL)


def _up_to(byte: int) -> bytes:
    return b"[\\x00-\\x%02x]" % byte


class _Plain(pickle.Unpickler):
    """The second lock: even an opcode that slipped through finds no class and no function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError("no globals")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("no persistent objects")


@contextmanager
def without_collections() -> Iterator[None]:
    """Without the garbage collector, which would walk all that was read again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
