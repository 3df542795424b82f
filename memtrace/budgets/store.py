"""Measurements that are kept: baselines of this session, and saved ones for later sessions.

Both are the bytes of each metric by device, ``{"cpu": {"peak": 4194304, …}}``, as JSON.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from memtrace.errors import MemtraceError

#: Version of the files.
SCHEMA = 1

#: Metric → bytes, by device.
Values = Mapping[str, Mapping[str, int]]


class Baselines:
    """Named measurements of this session, in a folder that its xdist workers share.

    A test with parameters keeps one baseline for each set of them (their id), and its like finds
    its own: ``test_ours[4096]`` the one that ``test_theirs[4096]`` measured.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, parameters: str, values: Values | None) -> None:
        """Keep what was measured; None: its test failed before there was anything to measure."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(name, parameters)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"name": name, "values": values}), encoding="utf-8")
        scratch.replace(path)

    def get(self, name: str, parameters: str) -> Values | None:
        """The one of these parameters, or the only one; None: nobody has measured it yet.

        Raises:
            MemtraceError: it failed, or there are several and none of these parameters.
        """
        path = self._path(name, parameters)
        paths = [path] if path.exists() else sorted(self.folder.glob(f"{_number(name)}-*.json"))
        if not paths:
            return None
        if len(paths) > 1:
            raise MemtraceError(
                f"baseline {name!r} was measured {len(paths)} times, with other parameters than "
                "these"
            )
        values: Values | None = json.loads(paths[0].read_text(encoding="utf-8"))["values"]
        if values is None:
            raise MemtraceError(f"baseline {name!r} was not measured: its test failed")
        return values

    def _path(self, name: str, parameters: str) -> Path:
        return self.folder / f"{_number(name)}-{_number(parameters)}.json"


def _number(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def saved_path(folder: Path, name: str) -> Path:
    """The file of measurements saved as ``name``.

    Raises:
        MemtraceError: it can't be a file's name.
    """
    if not name or name != Path(name).name or name.startswith("."):
        raise MemtraceError(f"{name!r} is no name to save measurements by; use one like main")
    return folder / f"{name.removesuffix('.json')}.json"


def save(path: Path, tests: Mapping[str, Values]) -> None:
    """Replace the file, in a form that a diff of versions shows well: sorted, a number a line.

    Raises:
        MemtraceError: it can't be written.
    """
    ordered = {name: tests[name] for name in sorted(tests)}
    text = json.dumps({"schema": SCHEMA, "tests": ordered}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise MemtraceError(f"{path} can't be written: {error.strerror}") from None


def load(path: Path) -> dict[str, Values]:
    """What :func:`save` wrote.

    Raises:
        MemtraceError: it is missing, damaged or of a newer version.
    """
    try:
        document: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        there = sorted(one.stem for one in path.parent.glob("*.json"))
        have = f"saved are {', '.join(there)}" if there else "nothing is saved yet"
        raise MemtraceError(f"{path} doesn't exist; {have} (--memory-save NAME)") from None
    except OSError as error:
        raise MemtraceError(f"{path} can't be read: {error.strerror}") from None
    except ValueError:
        raise MemtraceError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(document, dict) or not isinstance(document.get("schema"), int):
        raise MemtraceError(f"{path} holds no saved measurements")
    if document["schema"] > SCHEMA:
        raise MemtraceError(f"{path} is of a newer version; upgrade memtrace to read it")
    tests = document.get("tests")
    if not isinstance(tests, dict) or not all(map(_is_values, tests.values())):
        raise MemtraceError(f"{path} is damaged: its tests are no sizes by device")
    return tests


def _is_values(found: Any) -> bool:
    return isinstance(found, dict) and all(
        isinstance(sizes, dict) and _are_sizes(sizes.values()) for sizes in found.values()
    )


def _are_sizes(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)
