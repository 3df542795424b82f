"""What markers, fixtures and configuration say of budgets, and its parser.

A budget is a set of words, the same everywhere: metrics with their limits (``peak="2 GiB"``,
``Temp="8 MiB"``), and what holds for all of these (``phase``, ``tolerance``, ``scope``, …).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memtrace.components import TENSOR_COMPONENTS, base
from memtrace.devices import choose
from memtrace.errors import MemtraceError
from memtrace.sizes import format_size, parse_rate, parse_size

#: The sums of components that can be limited; :data:`memtrace.analysis.blocks.SUMS`, said here so
#: that parsing imports nothing.
SUMS = ("peak", "live", "end", "total")
METRICS = (*SUMS, *TENSOR_COMPONENTS)
SCOPES = ("test", "body")
_OTHERS = ("phase", "tolerance", "scope", "warmup", "name", "device", "allocator")
_FORMS = "write it as 300 MiB, 1.5 GiB, 2 GB (10⁹ bytes) or 4096 (bytes)"

_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_RELATIVE = re.compile(_SHARE.pattern + r"of\s+(\S.*?)\s*")


@dataclass(frozen=True)
class Size:
    """Bytes, or a share of something: of a baseline if ``of`` names one."""

    bytes: int = 0
    percent: float | None = None
    of: str | None = None

    def of_bytes(self, whole: int) -> int:
        """In bytes, where the share is one of ``whole``."""
        return self.bytes if self.percent is None else int(whole * self.percent / 100)

    def __str__(self) -> str:
        if self.percent is None:
            return format_size(self.bytes)
        return f"{self.percent:g} %" + (f" of {self.of}" if self.of else "")


@dataclass(frozen=True)
class Limit:
    """At most ``size`` of ``metric``, and ``tolerance`` more."""

    metric: str
    size: Size
    phase: str | None = None
    tolerance: Size = Size()
    scope: str = "test"
    saved: bool = False  # ``size.of`` names measurements that were saved, not a baseline

    def allowed(self, reference: int = 0) -> int:
        """In bytes, tolerance and all; a share is one of ``reference`` bytes."""
        limit = self.size.of_bytes(reference)
        return limit + self.tolerance.of_bytes(limit)

    @property
    def name(self) -> str:
        """The metric, and the phase if it is limited to one."""
        return self.metric if self.phase is None else f"{self.metric} in {self.phase}"


@dataclass(frozen=True)
class Budget:
    """What one marker, ``with`` block or configuration says."""

    limits: tuple[Limit, ...] = ()
    lifted: tuple[str, ...] = ()  # metrics that are not limited here, whatever holds further out
    scope: str = "test"
    warmup: int = 0
    name: str | None = None  # as a baseline for others
    device: str | None = None  # cards that aren't there; None: what there is
    allocator: str = ""  # PYTORCH_CUDA_ALLOC_CONF, on such cards


@dataclass(frozen=True)
class Plateau:
    """Memory that stays put over requests."""

    requests: int
    slope: float  # bytes a request
    text: str  # as it was written
    warmup: int


def parse_budget(words: Mapping[str, Any], *, block: bool = False, default: bool = False) -> Budget:
    """The words of ``memory_budget``.

    Args:
        words: names and values.
        block: of a ``with`` block, which can't be run twice or begin before itself.
        default: of the whole suite, which names no baseline.

    Raises:
        MemtraceError: an unknown word, or a value that can't be.
    """
    for word in words:
        if word not in _OTHERS and not _is_metric(word):
            raise MemtraceError(
                f"memory_budget doesn't know {word!r}; budgets are {', '.join(METRICS)}, "
                f"and words for all of them {', '.join(_OTHERS)}"
            )
    marker_only = ("device", "allocator")
    for word in (
        ("scope", "warmup", *marker_only) if block else ("name", *marker_only) if default else ()
    ):
        if word in words:
            where = "a with block, only to the marker" if block else "the default budget"
            raise MemtraceError(f"memory_budget({word}=…) doesn't belong to {where}")
    scope, name = words.get("scope", "test"), words.get("name")
    if scope not in SCOPES:
        raise MemtraceError(f'memory_budget(scope={scope!r}): write "test" or "body"')
    phase, tolerance = words.get("phase"), words.get("tolerance", 0)
    for word, text in (("phase", phase), ("name", name)):
        if text is not None and (not isinstance(text, str) or not text):
            raise MemtraceError(f"memory_budget({word}={text!r}): {word} is a name")
    metrics = {word: value for word, value in words.items() if word not in _OTHERS}
    device, allocator = _card(words)
    if not metrics and name is None and device is None:
        raise MemtraceError('memory_budget needs a budget, as in memory_budget(peak="300 MiB")')
    if phase is not None and "end" in metrics:
        raise MemtraceError("memory_budget(end=…) is about the end of a test, not of a phase")
    common = Limit(
        "",
        Size(),
        phase=phase,
        scope=scope,
        tolerance=_size("tolerance", tolerance, "or as 5 %", _share),
    )
    return Budget(
        limits=tuple(
            replace(common, metric=metric, size=_size(metric, value, "or as 50 % of NAME", _of))
            for metric, value in metrics.items()
            if value is not None
        ),
        lifted=tuple(metric for metric, value in metrics.items() if value is None),
        scope=scope,
        warmup=_count("memory_budget", "warmup", words.get("warmup", 0), least=0),
        name=name,
        device=device,
        allocator=allocator,
    )


def _card(words: Mapping[str, Any]) -> tuple[str | None, str]:
    """A virtual card, or None, and the settings of its allocator."""
    device, allocator = words.get("device"), words.get("allocator", "")
    for word, text in (("device", device), ("allocator", allocator)):
        if word in words and not isinstance(text, str):
            raise MemtraceError(f"memory_budget({word}={text!r}): {word} is a text")
    if device is not None:
        choose(device)
    elif allocator:
        raise MemtraceError("memory_budget(allocator=…) needs device=…, the card that it is of")
    return device, allocator


def parse_plateau(words: Mapping[str, Any]) -> Plateau:
    """The words of ``memory_plateau``: ``requests``, ``slope`` and ``warmup``.

    Raises:
        MemtraceError: an unknown word, or a value that can't be.
    """
    from memtrace.analysis.stability import FEWEST

    known = ("requests", "slope", "warmup")
    for word in words:
        if word not in known:
            raise MemtraceError(
                f"memory_plateau doesn't know {word!r}; it takes {', '.join(known)}"
            )
    for word in ("requests", "slope"):
        if word not in words:
            raise MemtraceError(
                f"memory_plateau needs {word}, as in "
                'memory_plateau(requests=40, slope="1 MiB/100 requests")'
            )
    requests = _count("memory_plateau", "requests", words["requests"], least=1)
    warmup = words.get("warmup", max(1, requests // 10))
    text = words["slope"]
    try:
        rate = parse_rate(text)
    except MemtraceError:
        raise MemtraceError(
            f"memory_plateau(slope={text!r}): write it as 1 MiB/100 requests or 64 KiB/request"
        ) from None
    if requests - _count("memory_plateau", "warmup", warmup, least=0) < FEWEST:
        raise MemtraceError(
            f"memory_plateau(requests={requests}): {FEWEST} or more must be left after the warm-up"
        )
    return Plateau(
        requests=requests,
        slope=rate,
        text=text,
        warmup=warmup,
    )


def parse_regression(text: str, saved: str) -> Limit:
    """``"peak:5%"`` or ``"Temp:1 MiB"``: a metric may be so much above its value in ``saved``.

    Raises:
        MemtraceError: it says something else.
    """
    metric, colon, more = text.partition(":")
    metric = metric.strip()
    if not colon or not _is_metric(metric):
        raise MemtraceError(
            f"{text!r} is no regression to fail on; write it as peak:5% or Temp:1MiB, with one of "
            f"{', '.join(METRICS)}"
        )
    tolerance = _size(metric, more.strip(), "or as 5 %", _share)
    return Limit(metric, Size(percent=100, of=saved), tolerance=tolerance, saved=True)


def parse_default(lines: Sequence[str]) -> Budget | None:
    """The suite's own budget from ``WORD = VALUE`` lines; None: it has none.

    Raises:
        MemtraceError: a line isn't of that form, or says what can't be.
    """
    words: dict[str, Any] = {}
    for line in lines:
        word, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not value:
            raise MemtraceError(f"{line!r} is no budget; write lines as peak = 2 GiB")
        words[word] = int(value) if value.isdecimal() else value
    return parse_budget(words, default=True) if words else None


def _is_metric(word: str) -> bool:
    if word in SUMS:
        return True
    try:
        base(word)
    except ValueError:
        return False
    return True


def _size(word: str, value: Any, otherwise: str, *others: Callable[[str], Size | None]) -> Size:
    for parse in others:
        found = parse(value) if isinstance(value, str) else None
        if found is not None:
            return found
    try:
        return Size(parse_size(value))
    except MemtraceError:
        raise MemtraceError(f"{word}: {value!r} is not a size; {_FORMS}, {otherwise}") from None


def _share(text: str) -> Size | None:
    match = _SHARE.fullmatch(text)
    return Size(percent=float(match[1])) if match else None


def _of(text: str) -> Size | None:
    match = _RELATIVE.fullmatch(text)
    return Size(percent=float(match[1]), of=match[2]) if match else None


def _count(marker: str, word: str, value: Any, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MemtraceError(f"{marker}({word}={value!r}): write a whole number from {least} on")
    return value
