"""Out-of-memory messages of PyTorch, found in any text: torch 1.x to 2.15.

A message states sizes that are rounded to two digits, so each is read as the range of bytes that is
written so. What a message doesn't state is None.
"""

import codecs
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from io import BufferedReader, TextIOWrapper
from math import ceil, floor
from pathlib import Path
from typing import Any, BinaryIO, Self, TextIO

from memtrace.analysis.failure import Kind
from memtrace.errors import MemtraceError
from memtrace.sizes import format_size

_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class Rounded:
    """A size as it was written, and the smallest and largest number of bytes written so."""

    text: str
    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """``"20.00 MiB"`` → from 19.995 to 20.005 MiB."""
        number, unit = text.split()
        scale = _UNITS[unit]
        half = 0.0 if scale == 1 else scale * 0.5 / 10 ** len(number.partition(".")[2])
        low, high = float(number) * scale - half, float(number) * scale + half
        return cls(text, max(0, ceil(low)), floor(high))

    @property
    def about(self) -> int:
        """The middle of the range."""
        return (self.low + self.high) // 2


class Form(StrEnum):
    """How a message is written."""

    SHORT = "torch 1.x and 2.0"
    LONG = "torch 2.1 and newer"
    REJECTED = "throw_on_cudamalloc_oom, torch 2.12 and newer"
    ASYNC = "cudaMallocAsync"
    BARE = "an error of the CUDA driver, without numbers"


@dataclass(frozen=True)
class OomMessage:
    """One message; of equal ones from the same rank the first.

    Attributes:
        line: of the text, from 1.
        rank: of a distributed launch, where the line begins with it.
        times: how often it is there.
        requested: what the device was asked for, of a small tensor the segment; where it was
            rejected, what the tensor needs.
        free: on the device, after the attempt.
        allocated: by PyTorch, without what is free in private pools.
        unallocated: reserved by PyTorch, and neither allocated nor in private pools.
        private: free in private pools.
        allowed: by a memory fraction.
        process: used by the process, all in all.
        others: other processes, by the pid that the driver gives them; not the process itself,
            which a message from a container names so.
    """

    line: int
    rank: int | None
    form: Form
    times: int = 1
    device: int | None = None
    requested: Rounded | None = None
    total: Rounded | None = None
    free: Rounded | None = None
    allocated: Rounded | None = None
    unallocated: Rounded | None = None
    private: Rounded | None = None
    allowed: Rounded | None = None
    process: Rounded | None = None
    others: tuple[tuple[int, Rounded], ...] = ()


_SIZE = r"(\d{1,15}(?:\.\d{1,6})? (?:bytes|B|KiB|MiB|GiB))"
_START = re.compile(
    r"(?:CUDA|HIP) out of memory\. (?=Tried|Allocation was)"
    r"|Allocation on device (?=\d{1,4} would exceed allowed memory)"
    r"|(?:CUDA|HIP) error: out of memory|cuda runtime error \(2\) ?: out of memory"
)
_RANK = re.compile(r"\[?rank ?:?(\d{1,6})\]?:", re.IGNORECASE)
#: Between two words: also a new line, with what launchers put before each.
_GAP = re.compile(r"\s*\n\s*(?:\[?rank ?:?\d{1,6}\]?:\s*)?|\s+", re.IGNORECASE)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
#: No message is longer.
_LONGEST = 4000

_TRIED = re.compile(rf"Tried to allocate {_SIZE}")
_SHORT = re.compile(
    rf" ?\(GPU (\d{{1,4}}); {_SIZE} total capacity; {_SIZE} already allocated; {_SIZE} free;"
    rf"(?: {_SIZE} allowed;)? {_SIZE} (cached|reserved in total by PyTorch)\)"
)
_CAPACITY = re.compile(
    rf"\. GPU (\d{{1,4}}) has a total capaci?ty of {_SIZE} of which {_SIZE} is free\."
)
_OTHER = re.compile(rf"Process (\d{{1,10}}) has {_SIZE} memory in use\.")
_PROCESS = re.compile(rf"this process has {_SIZE} memory in use\.")
_ALLOWED = re.compile(rf"{_SIZE} allowed;")
_HELD = re.compile(
    rf"Of the allocated memory {_SIZE} is allocated by PyTorch,"
    rf"(?: with {_SIZE} allocated in private pools \(e\.g\., CUDA Graphs\),)?"
    rf" and {_SIZE} is reserved by PyTorch but unallocated"
)
_REJECTED = re.compile(
    r"Allocation was preemptively rejected because it would exceed per_process_memory_fraction"
    rf" limit\. Requested size: {_SIZE}"
)
_ASYNC = re.compile(
    r"(\d{1,4}) would exceed allowed memory\. \(out of memory\)"
    rf" Currently allocated : {_SIZE} Requested : {_SIZE} Device limit : {_SIZE}"
    rf" Free \(according to CUDA\): {_SIZE}"
    rf"(?: PyTorch limit \(set by user-supplied memory fraction\) : {_SIZE})?"
)


def find_messages(text: str) -> list[OomMessage]:
    """Every message in ``text``, in order; equal ones of a rank once."""
    found: dict[tuple[OomMessage, int | None], OomMessage] = {}
    for message in _messages(text):
        key = replace(message, line=0), message.rank
        known = found.get(key)
        found[key] = message if known is None else replace(known, times=known.times + 1)
    return list(found.values())


def _messages(text: str) -> Iterator[OomMessage]:
    starts = list(_START.finditer(text))
    line, counted = 1, 0
    for place, start in enumerate(starts):
        line += text.count("\n", counted, start.start())
        counted = start.start()
        end = starts[place + 1].start() if place + 1 < len(starts) else len(text)
        body = _ANSI.sub("", text[start.end() : min(end, start.end() + _LONGEST)])
        before = text[text.rfind("\n", 0, start.start()) + 1 : start.start()]
        rank = _RANK.search(_ANSI.sub("", before[-_LONGEST:]))
        message = OomMessage(line, int(rank[1]) if rank else None, Form.BARE)
        if start[0].startswith("Allocation"):
            yield _async(message, _GAP.sub(" ", body))
        elif "error" in start[0]:
            yield message
        else:
            yield _native(message, _GAP.sub(" ", body))


def _native(message: OomMessage, body: str) -> OomMessage:
    rejected = _REJECTED.match(body)
    if rejected:
        return replace(message, form=Form.REJECTED, requested=Rounded.parse(rejected[1]))
    tried = _TRIED.match(body)
    if not tried:
        return message
    message = replace(message, form=Form.LONG, requested=Rounded.parse(tried[1]))
    short = _SHORT.match(body, tried.end())
    if short:
        device, total, allocated, free, allowed, held, kind = short.groups()
        has = Rounded.parse(allocated)
        rest = Rounded.parse(held)
        if kind != "cached":  # what is reserved in all
            rest = _difference(rest, has)
        return replace(
            message,
            form=Form.SHORT,
            device=int(device),
            total=Rounded.parse(total),
            allocated=has,
            free=Rounded.parse(free),
            allowed=_parse(allowed),
            unallocated=rest,
        )
    capacity = _CAPACITY.match(body, tried.end())
    if not capacity:
        return message
    process, allowed_ = _PROCESS.search(body), _ALLOWED.search(body)
    held_ = _HELD.search(body)
    private = _parse(held_[2]) if held_ else None
    allocated_ = Rounded.parse(held_[1]) if held_ else None
    if allocated_ is not None and private is not None:  # the message counts it as allocated
        allocated_ = _difference(allocated_, private)
    found = replace(
        message,
        device=int(capacity[1]),
        total=Rounded.parse(capacity[2]),
        free=Rounded.parse(capacity[3]),
        allocated=allocated_,
        private=private,
        unallocated=Rounded.parse(held_[3]) if held_ else None,
        process=Rounded.parse(process[1]) if process else None,
        allowed=Rounded.parse(allowed_[1]) if allowed_ else None,
        others=tuple((int(pid), Rounded.parse(size)) for pid, size in _OTHER.findall(body)),
    )
    return _knowing_itself(found)


def _knowing_itself(message: OomMessage) -> OomMessage:
    """Inside a container a process doesn't find its pid among those of the driver, and names itself
    like another: the one that isn't on the device beside what PyTorch reserved here."""
    if message.process is not None or message.total is None or message.free is None:
        return message
    reserved = _sum(message.allocated, message.unallocated, message.private)
    used = _difference(message.total, message.free)
    own = [
        (pid, size)
        for pid, size in message.others
        if size.high >= reserved.low and size.low + reserved.low > used.high
    ]
    if len(own) != 1:
        return message
    others = tuple(other for other in message.others if other != own[0])
    return replace(message, process=own[0][1], others=others)


def _async(message: OomMessage, body: str) -> OomMessage:
    found = _ASYNC.match(re.sub(r" ?: ", " : ", body).replace("CUDA) :", "CUDA):"))
    if not found:
        return message
    device, allocated, requested, total, free, allowed = found.groups()
    limit = _parse(allowed)
    # Without a fraction the limit is the largest number there is.
    limited = limit is not None and limit.low < Rounded.parse(total).high
    return replace(
        message,
        form=Form.ASYNC,
        device=int(device),
        requested=Rounded.parse(requested),
        total=Rounded.parse(total),
        free=Rounded.parse(free),
        allocated=Rounded.parse(allocated),
        allowed=limit if limited else None,
    )


def _parse(text: str | None) -> Rounded | None:
    return None if text is None else Rounded.parse(text)


def _difference(more: Rounded, less: Rounded) -> Rounded:
    low, high = max(0, more.low - less.high), max(0, more.high - less.low)
    return Rounded(f"{more.text} - {less.text}", low, high)


@dataclass(frozen=True)
class Conclusion:
    """What follows from a message.

    Attributes:
        kind: why there was no room; None: the message doesn't tell.
        sure: nothing else fits the numbers, however they were rounded.
        words: the same in a sentence or two.
        unknown: what the message can't tell, in words.
    """

    kind: Kind | None
    sure: bool
    words: str
    unknown: tuple[str, ...]


_WHO = "which tensors hold the memory, and where in the program they were made"
_PIECES = (
    "how the unallocated memory is split: into pieces between live blocks, on other streams, or "
    "waiting for one (then asking again succeeds)"
)
_POOLS = "whether private pools of CUDA graphs are among it: torch up to 2.0 doesn't say"


def conclude(message: OomMessage) -> Conclusion:
    """Why there was no room, as far as the message tells."""
    wanted = message.requested
    if message.form is Form.BARE or wanted is None:
        return Conclusion(
            None,
            False,
            "A call to the CUDA driver found no memory. The message has no numbers."
            if message.form is Form.BARE
            else "The message breaks off before its numbers.",
            ("how much was asked for, by whom, and who held the memory",),
        )
    asked = f"{wanted.text} were asked of the device"
    if message.form is Form.REJECTED:
        words = f"{wanted.text} were asked for, more than the memory fraction leaves."
        return Conclusion(Kind.FRACTION, True, words, (_WHO, "how large the fraction is"))
    if message.free is None or message.total is None or message.allocated is None:
        words = f"{asked}. The message breaks off before it says who held the memory."
        return Conclusion(None, False, words, (_WHO,))
    if wanted.low > message.total.high:
        words = f"{asked}, and it has {message.total.text} in all."
        return Conclusion(Kind.EXHAUSTED, True, words, (_WHO,))
    if message.free.low >= wanted.high:
        return _refused(message, f"{asked} and it has {message.free.text} free")
    if message.form is Form.ASYNC:
        words = f"{asked}, of which {message.free.text} are free."
        hidden = "what the driver's pool holds beyond what is allocated: nobody outside knows"
        return Conclusion(Kind.EXHAUSTED, False, words, (_WHO, hidden))
    return _too_little(message, asked, wanted, message.free)


def _refused(message: OomMessage, asked: str) -> Conclusion:
    """The device had room."""
    assert message.requested is not None
    if message.allowed is None:
        words = (
            f"{asked}: by the message there was room. Another process may have held it a moment "
            "before, or something else limits this one (a limit of the system, WSL)."
        )
        return Conclusion(Kind.UNEXPLAINED, False, words, (_WHO, "what refused it"))
    held = _sum(message.allocated, message.unallocated, message.private, message.requested)
    sure = held.low > message.allowed.high
    words = f"{asked}, but the memory fraction allows this process {message.allowed.text}."
    return Conclusion(Kind.FRACTION, sure, words, (_WHO,))


def _too_little(message: OomMessage, asked: str, wanted: Rounded, free: Rounded) -> Conclusion:
    """The device had too little; what PyTorch reserved may have enough."""
    rest = message.unallocated or Rounded("an unknown amount", 0, 1 << 62)
    private = message.private or Rounded("0 bytes", 0, 0)
    short = message.form is Form.SHORT
    unknown = [_WHO, _PIECES, *([_POOLS] if short else [])]
    numbers = f"{rest.text} are reserved and unallocated, and {free.text} free on the device"
    if private.high:
        numbers = f"{private.text} are free in private pools, {numbers}"
    inside = _sum(rest, private, free)
    if inside.high < wanted.low:
        missing = _range(_difference(wanted, inside))
        words = f"{asked} and {missing} are missing however memory is arranged: {numbers}."
        return Conclusion(Kind.EXHAUSTED, True, words, (_WHO,))
    if inside.low < wanted.high:
        words = f"{asked}, about as much as is left: {numbers}. Rounded sizes tell no more."
        return Conclusion(None, False, words, tuple(unknown))
    without = _sum(rest, free)
    if private.about > rest.about or without.high < wanted.low:
        sure = without.high < wanted.low
        words = f"{asked}: {numbers}. What private pools have free serves nobody else."
        return Conclusion(Kind.PRIVATE, sure, words, (_WHO, "which graph or pool it is"))
    words = f"{asked} and would fit in what is left, in pieces: {numbers}."
    return Conclusion(Kind.FRAGMENTED, False, words, tuple(unknown))


def _sum(*sizes: Rounded | None) -> Rounded:
    known = [size for size in sizes if size is not None]
    text = " + ".join(size.text for size in known)
    return Rounded(text, sum(size.low for size in known), sum(size.high for size in known))


def notes(message: OomMessage) -> list[str]:
    """What else the numbers say, each a sentence."""
    found = []
    reserved = _sum(message.allocated, message.unallocated, message.private)
    if message.total is not None and reserved.low > message.total.high:
        found.append(
            "PyTorch holds more than the card has: the driver lends the host's memory (Windows and "
            "WSL do), which is slow."
        )
    if message.process is not None and message.unallocated is not None:
        outside = _difference(message.process, reserved)
        if outside.low > 0:
            found.append(
                f"{_range(outside)} of this process are not PyTorch's: the CUDA context, NCCL, "
                "other libraries."
            )
    for pid, size in message.others:
        found.append(f"Process {pid} holds {size.text}.")
    if message.process is not None and message.total is not None and message.free is not None:
        used = _sum(message.process, message.free, *(size for _, size in message.others))
        rest = _difference(message.total, used)
        if rest.low > 0:
            found.append(f"{_range(rest)} belong to processes that the message doesn't name.")
    if message.requested is not None and message.requested.text in _SEGMENTS:
        found.append(
            f"{message.requested.text} is what the allocator takes for any block "
            f"{_SEGMENTS[message.requested.text]}: the tensor is smaller."
        )
    return found


_SEGMENTS = {"2.00 MiB": "up to 1 MiB", "20.00 MiB": "of 1 to 10 MiB"}


def _range(size: Rounded) -> str:
    low, high = format_size(size.low), format_size(size.high)
    return low if low == high else f"{low} to {high}"


# -- what would help -------------------------------------------------------------------------------

_FRACTION = (
    "Raise the memory fraction: torch.cuda.set_per_process_memory_fraction(), or "
    "per_process_memory_fraction in PYTORCH_CUDA_ALLOC_CONF."
)
_HELP: dict[Kind | None, tuple[str, ...]] = {
    Kind.FRACTION: (_FRACTION,),
    Kind.PRIVATE: (
        "Delete CUDA graphs and MemPools that aren't used any more, then torch.cuda.empty_cache().",
        "Let graphs share one pool: torch.cuda.graph(other, pool=first.pool()).",
    ),
    Kind.FRAGMENTED: (
        "Catch the error and ask again once: if a block waited for another stream, it is free now.",
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (torch 2.1 and newer) is made for "
        "that; whether it is enough, the message doesn't tell.",
    ),
    Kind.EXHAUSTED: ("Hold less at that moment, or take a device with more memory.",),
    Kind.UNEXPLAINED: ("See who else uses the device at that moment: nvidia-smi.",),
}
_OTHERS = "Stop the other processes on the device."
_RECORD = (
    "Record the run (memtrace record -- python …) and explain that: it tells which blocks held the "
    "memory, which were in the way, and which settings avoid it."
)


def remedies(message: OomMessage, conclusion: Conclusion) -> list[str]:
    """What would help, in words, the cheapest first."""
    others = [_OTHERS] if message.others else []
    return [*others, *_HELP.get(conclusion.kind, ()), _RECORD]


def messages_document(name: str, found: Iterable[OomMessage]) -> dict[str, Any]:
    """What ``memtrace explain LOGFILE --json`` prints; docs/json.md describes it."""
    return {"schema": 1, "log": name, "messages": [_document(message) for message in found]}


def _document(message: OomMessage) -> dict[str, Any]:
    conclusion = conclude(message)
    sizes = ("requested", "total", "free", "allocated", "unallocated", "private", "allowed")
    return {
        "line": message.line,
        "rank": message.rank,
        "times": message.times,
        "form": str(message.form),
        "device": message.device,
        **{name: _range_of(getattr(message, name)) for name in (*sizes, "process")},
        "others": [{"pid": pid, "used": _range_of(used)} for pid, used in message.others],
        "verdict": conclusion.kind and str(conclusion.kind),
        "sure": conclusion.sure,
        "words": conclusion.words,
        "notes": notes(message),
        "unknown": list(conclusion.unknown),
        "help": remedies(message, conclusion),
    }


def _range_of(found: Rounded | None) -> dict[str, Any] | None:
    return None if found is None else {"text": found.text, "low": found.low, "high": found.high}


# -- in files --------------------------------------------------------------------------------------

_TRIGGER = re.compile("out of memory|would exceed allowed memory")
#: Lines after the first that a message may take, where something wrapped it.
_FOLLOWING = 20
_LONGEST_LINE = 1 << 20


def read_log(path: str) -> list[OomMessage]:
    """The messages in a text file; ``-``: on stdin.

    Raises:
        MemtraceError: it can't be read, or has none.
    """
    try:
        if path == "-":
            text, binary = _relevant(sys.stdin.buffer)
        else:
            with Path(path).open("rb") as file:
                text, binary = _relevant(file)
    except OSError as error:
        raise MemtraceError(f"{path} can't be read: {error.strerror}") from None
    name = "stdin" if path == "-" else path
    if not text:
        raise MemtraceError(f"{name} is empty")
    found = find_messages(text)
    if not found:
        if binary:
            raise MemtraceError(
                f"{name} is no text: memtrace explain reads runs and logs; a snapshot of PyTorch's "
                "allocator becomes a run by memtrace import"
            )
        raise MemtraceError(f"{name} has no out-of-memory message of PyTorch in it")
    return found


def _relevant(log: BinaryIO) -> tuple[str, bool]:
    """The lines that messages may stand in, the others empty, and whether there are NULs."""
    kept: list[str] = []
    left, binary = 0, False
    with _as_text(log) as text:
        while line := text.readline(_LONGEST_LINE):
            if _TRIGGER.search(line):
                left = _FOLLOWING + 1
            binary = binary or "\0" in line
            kept.append(line if left > 0 else "\n" if line.endswith("\n") else " ")
            left -= 1
    return "".join(kept), binary


def _as_text(log: BinaryIO) -> TextIO:
    buffered = log if isinstance(log, BufferedReader) else BufferedReader(log)  # type: ignore[type-var]
    # PowerShell writes UTF-16.
    marked = buffered.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding = "utf-16" if marked else "utf-8"
    return TextIOWrapper(buffered, encoding=encoding, errors="replace", newline="\n")
