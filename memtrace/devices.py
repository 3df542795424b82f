"""The catalogue of cards: ours (``devices.toml``, every figure with its source) and the user's own.

A user's catalogue is ``~/.config/memtrace/devices.toml`` (``XDG_CONFIG_HOME`` is respected). It has
the form of ours, but a figure may stand there without a source. A card of the same name replaces
ours.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memtrace.errors import MemtraceError

_OURS = Path(__file__).with_name("devices.toml")

#: How a figure that isn't known is written in a catalogue.
_UNKNOWN = "unknown"

#: As many cards as the virtual GPU's libraries have room for.
MAX_DEVICES = 16

_REQUIRED = ("name", "total", "capability", "processors", "l2_cache")
_OPTIONAL = ("context", "integrated", "pool")
_ARCHITECTURE = (
    "shared_per_block",
    "shared_per_processor",
    "threads_per_processor",
    "blocks_per_processor",
    "cublas_workspace",
)


@dataclass(frozen=True)
class Device:
    """One card. Sizes in bytes.

    Attributes:
        key: its name in the catalogue.
        name: its name as the driver says it.
        total: all of its memory, as CUDA reports it.
        context: what a CUDA context takes of that; None if unknown.
        capability: compute capability, such as (8, 0).
        processors: streaming multiprocessors.
        l2_cache: L2 cache.
        integrated: whether it shares the host's memory.
        pool: the most that the pool of cudaMallocAsync can hold; None: all that there is.
        shared_per_block: shared memory that one block can ask for.
        shared_per_processor: shared memory of a multiprocessor.
        threads_per_processor: threads that a multiprocessor holds.
        blocks_per_processor: blocks that a multiprocessor holds.
        cublas_workspace: what PyTorch allocates for each cuBLAS handle and stream.
        sources: where each figure is from, by its name; "unknown" for one that isn't known.
    """

    key: str
    name: str
    total: int
    context: int | None
    capability: tuple[int, int]
    processors: int
    l2_cache: int
    integrated: bool
    pool: int | None
    shared_per_block: int
    shared_per_processor: int
    threads_per_processor: int
    blocks_per_processor: int
    cublas_workspace: int
    sources: Mapping[str, str] = field(compare=False, repr=False)


def catalogue() -> dict[str, Device]:
    """All cards by name.

    Raises:
        MemtraceError: the user's catalogue can't be read or is wrong.
    """
    ours = _read(_OURS)
    devices = _devices(_OURS, ours)
    path = _users()
    if path.is_file():
        theirs = _read(path)
        known = {name: ours[name] | theirs.get(name, {}) for name in ("architectures", "sources")}
        devices |= _devices(path, theirs | known)
    return devices


def choose(text: str) -> list[Device]:
    """``2×a100-40g,h100-80g`` → three cards, in that order; ``2xa100-40g`` means the same.

    Raises:
        MemtraceError: a card isn't in the catalogue, or there are too many or none.
    """
    known = catalogue()
    chosen: list[Device] = []
    for word in text.split(","):
        count, key = _counted(word.strip(), known)
        if key not in known:
            raise MemtraceError(
                f"{word.strip()!r} is no known card; known are {', '.join(known)} "
                f"(see memtrace devices), and yours in {_users()}"
            )
        chosen += [known[key]] * min(count, MAX_DEVICES + 1)
    if not 1 <= len(chosen) <= MAX_DEVICES:
        raise MemtraceError(f"{text!r} asks for no card or for more than {MAX_DEVICES}")
    return chosen


def _counted(word: str, known: Mapping[str, Device]) -> tuple[int, str]:
    match = re.fullmatch(r"(\d{1,9})\s*[×x]\s*(.+)", word)
    return (int(match[1]), match[2]) if match and word not in known else (1, word)


def _users() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base, "memtrace", "devices.toml")


def _read(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MemtraceError(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise MemtraceError(f"{path} is not a TOML file: {error}") from None
    for name, table in document.items():
        if name not in ("devices", "architectures", "sources") or not isinstance(table, dict):
            raise MemtraceError(
                f"{path}: {name!r} is not expected; a catalogue has the tables devices, "
                "architectures and sources"
            )
    return document


def _devices(path: Path, document: Mapping[str, Any]) -> dict[str, Device]:
    return {
        key: _device(path, key, entry, document)
        for key, entry in document.get("devices", {}).items()
    }


def _device(path: Path, key: str, entry: object, document: Mapping[str, Any]) -> Device:
    where = f"{path}: device {key!r}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", key):
        raise MemtraceError(f"{where}: a name is made of letters, digits, '.', '_' and '-'")
    sources = document["sources"]
    figures = _figures(where, entry, _REQUIRED, _OPTIONAL, sources)
    capability = figures["capability"][0]
    architecture = document["architectures"].get(capability)
    if architecture is None:
        raise MemtraceError(
            f"{where}: nothing is known of capability {capability}; describe it in "
            f'[architectures."{capability}"]'
        )
    where_architecture = f"{path}: architecture {capability}"
    figures |= _figures(where_architecture, architecture, _ARCHITECTURE, (), sources)
    values: dict[str, Any] = {"context": None, "integrated": False, "pool": None}
    values |= {name: value for name, (value, _) in figures.items()}
    for part in ("context", "pool"):
        if values[part] and values[part] >= values["total"]:
            raise MemtraceError(f"{where}: its {part} takes all of its memory or more")
    major, minor = map(int, capability.split("."))
    values |= {"key": key, "capability": (major, minor)}
    return Device(**values, sources={name: source for name, (_, source) in figures.items()})


def _figures(
    where: str,
    entry: object,
    required: tuple[str, ...],
    optional: tuple[str, ...],
    sources: Mapping[str, str],
) -> dict[str, tuple[Any, str]]:
    """Each figure's value (None if unknown) and source."""
    if not isinstance(entry, dict):
        raise MemtraceError(f"{where} is not a table")
    if missing := [name for name in required if name not in entry]:
        raise MemtraceError(f"{where} lacks {', '.join(missing)}")
    if surplus := [name for name in entry if name not in (*required, *optional)]:
        raise MemtraceError(f"{where} has {', '.join(surplus)}, which mean nothing there")
    figures = {}
    for name, written in entry.items():
        value, source = written, "the user's catalogue"
        if isinstance(written, dict):
            value, source = written.get("value"), str(written.get("source"))
            source = sources.get(source, source)
        if value == _UNKNOWN and name in optional:
            value, source = None, _UNKNOWN
        elif not _is_valid(name, value):
            raise MemtraceError(f"{where}: {name} can't be {value!r}")
        figures[name] = (value, source)
    return figures


def _is_valid(name: str, value: object) -> bool:
    if name == "name":
        # What separates fields on the way to the virtual GPU's libraries can't be part of one.
        return isinstance(value, str) and 0 < len(value) < 200 and not set(value) & set("|;\n\0")
    if name == "capability":
        return isinstance(value, str) and re.fullmatch(r"\d{1,2}\.\d", value) is not None
    if name == "integrated":
        return isinstance(value, bool)
    limit = 2**40 if name in ("total", "context", "pool") else 2**31
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < limit
