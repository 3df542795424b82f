"""Memory cgroups: the limits that containers and job schedulers set, of version 1 and 2."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: A limit beyond this is none: cgroup v1 says the largest multiple of a page for "no limit".
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Cgroup:
    """The memory cgroup of a process; bytes, None: no limit or unknown."""

    folder: Path
    kills: int | None  # how often the OOM killer has struck in it
    limit: int | None  # the smallest of it and those above
    limited: Path | None  # the one that has this limit
    used: int | None  # of that one


def memory_cgroup(place: str) -> Cgroup | None:
    """The memory cgroup, of version 1 or 2, that a ``/proc/PID/cgroup`` names; None if unseen."""
    lines = (line.split(":", 2) for line in place.splitlines())
    paths = {names: path for _, names, path in lines}
    mounts = read("/proc/self/mountinfo").splitlines()
    controller = next((names for names in paths if "memory" in names.split(",")), "")
    if controller not in paths:
        return None
    top = next((top for top in map(_mount, mounts) if top and top.memory == bool(controller)), None)
    if top is None:
        return None
    path = paths[controller]
    if top.root != "/":  # a container sees a part of the tree only
        if path != top.root and not path.startswith(top.root + "/"):
            return None
        path = path[len(top.root) :]
    folder = top.point / path.lstrip("/")
    if not folder.is_dir():
        return None
    limit, limited = _limit(folder, top.point)
    return Cgroup(folder, kills(folder), limit, limited, None if not limited else used(limited))


@dataclass(frozen=True)
class _Mount:
    root: str
    point: Path
    memory: bool  # version 1, of the memory controller; else version 2


def _mount(line: str) -> _Mount | None:
    mount, _, filesystem = line.partition(" - ")
    kind, _, options = filesystem.split(" ", 2)
    if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
        _, _, _, root, point, *_ = mount.split(" ")
        return _Mount(root, Path(point), memory=kind == "cgroup")
    return None


def kills(folder: Path) -> int | None:
    """How often the OOM killer struck in a cgroup (or also below it, in older kernels)."""
    for name in ("memory.oom_control", "memory.events.local", "memory.events"):
        found = counter(folder / name, "oom_kill")
        if found is not None:
            return found
    return None


def _limit(folder: Path, top: Path) -> tuple[int | None, Path | None]:
    """The smallest limit from ``folder`` up to ``top``, and which cgroup has it."""
    smallest, where = _NO_LIMIT, None
    for level in [folder, *folder.parents]:
        for name in ("memory.max", "memory.limit_in_bytes"):
            value = _number(level / name)
            if value is not None and value < smallest:
                smallest, where = value, level
        if level == top:
            break
    return smallest if where else None, where


def used(folder: Path) -> int | None:
    """What a cgroup and those below it hold, in bytes; None: unknown."""
    current = _number(folder / "memory.current")
    return _number(folder / "memory.usage_in_bytes") if current is None else current


def read(path: Path | str) -> str:
    """A small file of the kernel's; empty where it can't be read."""
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        return os.fsdecode(file.read())
    return ""


def _number(path: Path) -> int | None:
    text = read(path).strip()
    return int(text) if text.isdecimal() else None  # not there, or "max"


def counter(path: Path | str, name: str) -> int | None:
    """The number behind ``name`` in a file of such pairs."""
    for line in read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return None
