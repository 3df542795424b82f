"""Bytes as text and back: the only parser and formatter of sizes."""

import re

from memtrace.errors import MemtraceError

#: Growth over the requests of a persistent process that still counts as none, unless said else.
STEADY = "1 MiB/100 requests"

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
#: More digits than any number of bytes or requests has aren't read.
_RATE = re.compile(r"(.+?)\s*(?:/|\bper\b)\s*([0-9]{1,20})?\s*requests?\s*")
_PATTERN = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*")


def format_size(size: int, *, signed: bool = False) -> str:
    """``1610612736`` → ``"1.50 GiB"``; with ``signed``, a plus sign on growth."""
    sign = "-" if size < 0 else "+" if signed and size > 0 else ""
    value = abs(size)
    if value < 1024:
        return f"{sign}{value} B"
    unit, scale = next((u, s) for u, s in reversed(_UNITS.items()) if value >= s)
    return f"{sign}{value / scale:.{2 if unit == 'GiB' or unit == 'TiB' else 1}f} {unit}"


def parse_size(text: str | int) -> int:
    """``"300 MiB"``, ``"2GiB"``, ``"2 GB"`` (10⁹) or a plain number of bytes → bytes.

    Raises:
        MemtraceError: anything else, trailing text included.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    scale = match and ({"": 1} | _UNITS | _DECIMAL).get(match[2])
    if not match or not scale:
        raise MemtraceError(f"{text!r} is not a size; write it as 300 MiB, 1.5 GiB or 4096")
    return round(float(match[1]) * scale)


def parse_rate(text: str) -> float:
    """``"1 MiB/100 requests"``, ``"64 KiB/request"`` → bytes a request.

    Raises:
        MemtraceError: anything else.
    """
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    count = int(match[2] or 1) if match else 0
    if match is None or count == 0:
        raise MemtraceError(
            f"{text!r} is no rate; write it as 1 MiB/100 requests or 64 KiB/request"
        )
    return parse_size(match[1]) / count
