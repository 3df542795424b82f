"""The allocator's settings: ``PYTORCH_CUDA_ALLOC_CONF``, parsed and validated as PyTorch does.

Which keys there are, what they accept and what the allocator does by itself depends on the version
of PyTorch; versions are compared as ``(major, minor)``. Behaviour: ``c10/core/AllocatorConfig`` and
``c10/cuda/CUDAAllocatorConfig``, checked against the released builds.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Self

from memtrace.errors import MemtraceError

MiB = 1 << 20
#: Every block is at least this large and a multiple of it.
MIN_BLOCK = 512
#: Up to this rounded size a block comes from the small pool; in the large pool this much more than
#: was asked for stays inside a block.
SMALL_LIMIT = MiB
#: A segment of the small pool.
SMALL_SEGMENT = 2 * MiB
#: From this rounded size on a segment is made for one block, in multiples of ``ROUND_LARGE``.
MIN_LARGE = 10 * MiB
ROUND_LARGE = 2 * MiB
#: What smaller blocks of the large pool share, unless ``large_segment_size_mb`` says otherwise.
LARGE_SEGMENT = 20 * MiB
#: No limit, as PyTorch has it.
UNLIMITED = (1 << 64) - 1

Version = tuple[int, int]
#: Whose rules hold where nobody says a version: the newest that was checked.
NEWEST: Version = (2, 15)
#: The oldest whose rules are known.
OLDEST: Version = (2, 1)

_PLAIN = (0,) * 16


#: The variables of which PyTorch reads the first that is set; which comes first depends on its
#: version.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def environment_of(settings: str) -> dict[str, str]:
    """What makes every PyTorch take these settings; empty ones are its defaults."""
    return dict.fromkeys(_VARIABLES, settings)


class SettingsError(MemtraceError):
    """A settings string that PyTorch refuses."""


def parse_version(text: str) -> Version:
    """``"2.12.1+cu128"`` → ``(2, 12)``.

    Raises:
        MemtraceError: no version, or one whose allocator isn't known.
    """
    found = re.match(r"(\d+)\.(\d+)(?![\d])", text.strip())
    if not found:
        raise MemtraceError(f"{text!r} is not a version of torch; write it as 2.13")
    version = int(found[1]), int(found[2])
    if version < OLDEST:
        raise MemtraceError(f"the allocator of torch {text} isn't known; the oldest is 2.1")
    return version


@dataclass(frozen=True)
class Settings:
    """What the settings string sets; sizes in bytes.

    Attributes:
        max_split_size: larger blocks are not split.
        divisions: ``roundup_power2_divisions`` for sizes below 2 MiB, below 4 MiB, … and from
            32 GiB on (16 values; 0 and 1 mean none).
        max_non_split_rounding: how much larger than asked a block over ``max_split_size`` may be.
        gc_threshold: share of the allowed memory above which idle segments are collected; 0: never.
        large_segment: what blocks below 10 MiB share.
        expandable: segments grow by mapping pages.
        reserve: addresses of an expandable segment, in bytes or (a float) as a share of the
            device's memory; None: 9/8 of that.
        fraction: share of the device's memory that may be reserved.
        throw_on_oom: what exceeds ``fraction`` is refused, and nothing retried, unless it exceeds
            the limit that the program set too.
        backend: ``native`` or ``cudaMallocAsync``.
    """

    max_split_size: int = UNLIMITED
    divisions: tuple[int, ...] = _PLAIN
    max_non_split_rounding: int = LARGE_SEGMENT
    gc_threshold: float = 0.0
    large_segment: int = LARGE_SEGMENT
    expandable: bool = False
    reserve: float | int | None = None
    fraction: float = 1.0
    throw_on_oom: bool = False
    backend: str = "native"

    @classmethod
    def parse(cls, text: str, torch: Version = NEWEST) -> Self:
        """From ``PYTORCH_CUDA_ALLOC_CONF``, as that version of PyTorch reads it.

        Raises:
            SettingsError: what PyTorch refuses, in one sentence.
        """
        found: dict[str, Any] = {}
        tokens = _Tokens(text, torch)
        for key in tokens:
            reader = _KEYS.get(key)
            if reader is None or torch < reader.since:
                known = ", ".join(name for name, one in _KEYS.items() if torch >= one.since)
                version = ".".join(map(str, torch))
                raise SettingsError(
                    f"{_quoted(key)} is no setting of torch {version}'s allocator; it has {known}"
                )
            value = reader.read(tokens, key)
            if reader.sets and value is not None:
                found[reader.sets] = value
        large = found.get("large_segment", LARGE_SEGMENT)
        # Before 2.10 the limit itself was refused.
        least = large + (MiB if torch < (2, 10) else 0)
        for field in ("max_split_size", "max_non_split_rounding"):
            _at_least(f"{field.removesuffix('_size')}_mb", found.get(field, least), least)
        found.setdefault("max_non_split_rounding", large)
        return cls(**found)

    @classmethod
    def of_snapshot(cls, found: Mapping[str, Any], torch: Version = NEWEST) -> Self:
        """From ``allocator_settings`` of ``torch.cuda.memory._snapshot()``.

        What it names itself counts more than the string that it keeps.
        """
        settings = cls()
        text = found.get("PYTORCH_CUDA_ALLOC_CONF")
        if isinstance(text, str) and text:
            try:
                settings = cls.parse(text, torch)
            except SettingsError:  # of another version: what it named is below
                settings = cls()
        split = found.get("max_split_size", -1)
        divisions = found.get("roundup_power2_divisions") or {}
        return replace(
            settings,
            max_split_size=UNLIMITED if split < 0 else split,
            divisions=tuple(int(divisions.get(str(1 << n), 0)) for n in range(16)),
            gc_threshold=float(found.get("garbage_collection_threshold", 0.0)),
            expandable=bool(found.get("expandable_segments", False)),
        )

    def to_snapshot(self, text: str) -> dict[str, Any]:
        """As ``allocator_settings`` of a snapshot has them; ``text``: the settings string."""
        return {
            "PYTORCH_CUDA_ALLOC_CONF": text,
            "max_split_size": -1 if self.max_split_size == UNLIMITED else self.max_split_size,
            "garbage_collection_threshold": self.gc_threshold,
            "expandable_segments": self.expandable,
            "roundup_power2_divisions": {
                str(1 << place): value for place, value in enumerate(self.divisions)
            },
        }

    def round(self, requested: int) -> int:
        """The size of the block that a request of so many bytes asks for."""
        if self.divisions is not _PLAIN and requested > MIN_BLOCK:
            index = min(max(requested.bit_length() - 21, 0), 15)
            divisions = self.divisions[index]
            if divisions > 1 and requested > MIN_BLOCK * divisions:
                return _round_to_division(requested, divisions)
        return max(MIN_BLOCK, (requested + MIN_BLOCK - 1) & -MIN_BLOCK)

    def reservation(self, total: int) -> int:
        """Bytes of addresses for an expandable segment on a device of ``total`` bytes; whole pages
        are reserved."""
        most = total + total // 8
        if self.reserve is None:
            return most
        share = isinstance(self.reserve, float)
        return min(most, int(self.reserve * total) if share else int(self.reserve))

    def segment(self, size: int) -> int:
        """What a block of a rounded size makes the allocator ask the device for."""
        if size <= SMALL_LIMIT:
            return SMALL_SEGMENT
        if size < MIN_LARGE:
            return self.large_segment
        return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


def _round_to_division(size: int, divisions: int) -> int:
    """``size`` rounded up to the next of ``divisions`` steps between powers of two."""
    power = 1 << (size.bit_length() - 1)
    if size == power:
        return size
    step = power >> (divisions.bit_length() - 1)
    return 2 * power if step == 0 else (size + step - 1) // step * step


# -- the string --------------------------------------------------------------------------------


class _Tokens:
    """Words and the marks ``, : [ ]`` of a settings string; white space doesn't count."""

    def __init__(self, text: str, torch: Version) -> None:
        self.torch = torch
        self._tokens = re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s+", "", text))
        self._place = 0

    def __iter__(self) -> Iterator[str]:
        """Each key; its value has to be read before the next."""
        while self._place < len(self._tokens):
            yield self.next("")
            if self._place < len(self._tokens):
                self.expect(",", "")

    def next(self, key: str) -> str:
        if self._place >= len(self._tokens):
            raise SettingsError(f"the allocator settings end where {key} needs a value")
        self._place += 1
        return self._tokens[self._place - 1]

    def peek(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def expect(self, mark: str, key: str) -> None:
        found = self.next(key)
        if found != mark:
            after = f" after {key}" if key else ""
            raise SettingsError(
                f"the allocator settings have {_quoted(found)}{after}, not {mark!r}"
            )

    def value(self, key: str) -> str:
        self.expect(":", key)
        return self.next(key)


def _number(text: str, key: str) -> int:
    """A leading integer is enough, and a negative one wraps around: so C++ reads it."""
    found = re.match(r"([+-]?)0*(\d{1,20})(?!\d)", text)
    if not found or (number := int(found[2])) > UNLIMITED:
        raise SettingsError(f"{key} is a number, not {_quoted(text)}")
    return (-number if found[1] == "-" else number) & UNLIMITED


def _quoted(text: str) -> str:
    """What a settings string has there, so short that a sentence can say it."""
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


def _at_least(key: str, size: int, least: int) -> None:
    if size < least:
        raise SettingsError(f"{key} is {size // MiB}, and has to be at least {least // MiB}")


def _mib(tokens: _Tokens, key: str) -> int:
    number = _number(tokens.value(key), key)
    if number > UNLIMITED // MiB:  # for all purposes
        return UNLIMITED
    return number * MiB


def _large_segment(tokens: _Tokens, key: str) -> int:
    size = _mib(tokens, key)
    if size <= MIN_LARGE:
        raise SettingsError(f"{key} has to be more than 10")
    return size


def _share(accepts: Callable[[float], bool], expected: str) -> Callable[[_Tokens, str], float]:
    def read(tokens: _Tokens, key: str) -> float:
        text = tokens.value(key)
        found = re.match(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text)
        if not found or not accepts(float(found[0])):
            raise SettingsError(f"{key} is a number {expected}, not {_quoted(text)}")
        return float(found[0])

    return read


def _flag(tokens: _Tokens, key: str) -> bool:
    text = tokens.value(key)
    if text not in ("True", "False"):
        raise SettingsError(f"{key} is True or False, not {_quoted(text)}")
    return text == "True"


def _divisions(tokens: _Tokens, key: str) -> tuple[int, ...]:
    tokens.expect(":", key)
    first = tokens.next(key)
    if first != "[":
        return (_power(first, key),) * 16
    found = [0] * 16
    past = int(tokens.torch >= (2, 10))  # before, ">" changed the last entry as well
    after, begun = past, False  # where ">" begins; whether there was an entry
    while tokens.peek() != "]":
        size = tokens.next(key)
        text = tokens.value(key)
        divisions = 0 if text == "0" else _power(text, key)
        if size == ">":
            found[after:] = [divisions] * (16 - after)
        else:
            place = min(_power(size, key).bit_length() - 1, 15)
            if not begun:
                found[:place] = [divisions] * place
            found[place] = divisions
            after, begun = place + past, True
        if tokens.peek() != "]":
            tokens.expect(",", key)
    tokens.expect("]", key)
    return tuple(found)


def _reserve(tokens: _Tokens, key: str) -> float | int | None:
    """A share, or GiB; anything else PyTorch ignores with a warning."""
    text = tokens.value(key)
    found = re.fullmatch(r"(\+?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([gG]?)", text)
    number = float(found[1]) if found else 0.0
    if not found or number == 0 or number == inf:
        return None
    if found[2]:
        return int(number * (1 << 30))
    return number if number <= 1 else None


def _reserve_by_class(tokens: _Tokens, key: str) -> None:
    """Of streams that a program gave a class, of which nothing is known here."""
    tokens.expect(":", key)
    tokens.expect("[", key)
    while tokens.peek() != "]":
        _reserve(tokens, tokens.next(key))
        if tokens.peek() != "]":
            tokens.expect(",", key)
    tokens.expect("]", key)


def _power(text: str, key: str) -> int:
    number = _number(text, key)
    if number == 0 or number & (number - 1):
        raise SettingsError(f"{key} takes powers of two, not {_quoted(text)}")
    return number


def _backend(tokens: _Tokens, key: str) -> str:
    text = tokens.value(key)
    if text not in ("native", "cudaMallocAsync"):
        raise SettingsError(f"{key} is native or cudaMallocAsync, not {_quoted(text)}")
    return text


def _threads(tokens: _Tokens, key: str) -> int:
    number = _power(tokens.value(key), key)
    if number > 128:
        raise SettingsError(f"{key} is at most 128, not {number}")
    return number


@dataclass(frozen=True)
class _Key:
    """How a key is read, into which field, and since which version it exists."""

    read: Callable[[_Tokens, str], Any]
    sets: str | None = None  # None: changes nothing that is simulated
    since: Version = OLDEST


_KEYS: dict[str, _Key] = {
    "backend": _Key(_backend, "backend"),
    "expandable_segments": _Key(_flag, "expandable"),
    "expandable_segments_reserve": _Key(_reserve, "reserve", (2, 15)),
    "expandable_segments_reserve_by_class": _Key(_reserve_by_class, since=(2, 15)),
    "garbage_collection_threshold": _Key(
        _share(lambda x: 0 < x < 1, "above 0 and below 1"), "gc_threshold"
    ),
    "large_segment_size_mb": _Key(_large_segment, "large_segment", (2, 11)),
    "max_non_split_rounding_mb": _Key(_mib, "max_non_split_rounding"),
    "max_split_size_mb": _Key(_mib, "max_split_size"),
    "per_process_memory_fraction": _Key(
        _share(lambda x: 0 <= x <= 1, "from 0 to 1"), "fraction", (2, 10)
    ),
    "roundup_power2_divisions": _Key(_divisions, "divisions"),
    "throw_on_cudamalloc_oom": _Key(_flag, "throw_on_oom", (2, 12)),
    # These change locking, capture or host memory, not what a stream of requests is given.
    "graph_capture_record_stream_reuse": _Key(_flag, since=(2, 9)),
    "pinned_free_catch_all": _Key(_flag, since=(2, 12)),
    "pinned_max_cached_size_mb": _Key(_mib, since=(2, 13)),
    "pinned_max_round_threshold_mb": _Key(_mib, since=(2, 13)),
    "pinned_num_register_threads": _Key(_threads),
    "pinned_reserve_segment_size_mb": _Key(_mib, since=(2, 9)),
    "pinned_use_background_threads": _Key(_flag),
    "pinned_use_cuda_host_register": _Key(_flag),
    "release_lock_on_cudamalloc": _Key(_flag),
}
