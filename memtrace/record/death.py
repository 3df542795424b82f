"""Who ended the command: what the kernel counts and logs when it kills for lack of memory.

A process that the kernel's OOM killer ends can say nothing of it, and its exit status looks like
any other SIGKILL. So counters are read before and after, and the kernel's log where that may be
read. Each verdict is given with what it rests on; who sent a signal otherwise is unknown.
"""

import os
import re
import signal
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from memtrace.record.cgroup import Cgroup, counter, kills, memory_cgroup, read, used
from memtrace.record.process import stat
from memtrace.sizes import format_size

#: Each line of the log that begins so names a process that was killed for lack of memory:
#: "Out of memory: Killed process 7 (python)", "Memory cgroup out of memory: Killed process 7 …".
_KILLED = re.compile(r"ut of memory: Killed process (\d+) ")

#: The inode of the first process-id namespace (PROC_PID_INIT_INO in the kernel's source): only
#: there are the ids of the kernel's log ours.
_FIRST_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True)
class Facts:
    """What a verdict can rest on."""

    #: Lines of the kernel's log, by the process that they say was killed; None: can't be read.
    log: dict[int, str] | None = None
    #: The cgroup when it was first and last looked at; None: not known.
    before: Cgroup | None = None
    after: Cgroup | None = None
    #: How often the OOM killer struck on the whole machine meanwhile; None: unknown.
    machine_kills: int | None = None
    #: MemAvailable of the machine at the last look, in bytes.
    available: int | None = None
    #: Whether the launcher was sent the same signal, and passed it on or shared it (a terminal).
    passed_on: bool = False

    @property
    def kills(self) -> int | None:
        """How often the OOM killer struck in the cgroup meanwhile; None: unknown."""
        if self.before is None or self.after is None:
            return None
        if self.before.kills is None or self.after.kills is None:
            return None
        return self.after.kills - self.before.kills


class Witness:
    """Looks at what may tell of a death, from before the command starts."""

    def __init__(self) -> None:
        self._log = _open_log()
        self._machine = counter("/proc/vmstat", "oom_kill")
        self._place = ""
        self._before: Cgroup | None = None
        self._last: Cgroup | None = None
        self._available: int | None = None

    def look(self, pid: int) -> None:
        """While ``pid`` lives: where it is, and how much memory is left there."""
        place = read(f"/proc/{pid}/cgroup")
        now = stat(pid)
        if now is None or not now.rss:  # it ended meanwhile, and may stand in the topmost cgroup
            return
        if place != self._place:
            self._place = place
            self._before = self._last = memory_cgroup(place)
        elif self._last is not None and self._last.limited is not None:
            self._last = replace(self._last, used=used(self._last.limited))
        self._available = _available()

    def testify(self, *, passed_on: bool) -> Facts:
        """After the command's end; memory is told as at the last look, counters as of now."""
        after = self._last and replace(self._last, kills=kills(self._last.folder))
        machine = counter("/proc/vmstat", "oom_kill")
        known = machine is not None and self._machine is not None
        return Facts(
            log=None if self._log is None else _read_log(self._log),
            before=self._before,
            after=after,
            machine_kills=(machine or 0) - (self._machine or 0) if known else None,
            available=self._available,
            passed_on=passed_on,
        )


@dataclass(frozen=True)
class Victim:
    """The command's process as it was last seen; bytes, None: never sampled."""

    pid: int
    rss: int | None
    peak: int | None
    unseen_ms: int | None  # from the last sample to its end


def death(
    number: int | None, victim: Victim, family: Collection[int], facts: Facts
) -> dict[str, Any] | None:
    """What the manifest says of an end by signal ``number`` (None: it exited).

    Args:
        number: the signal that ended the command's process.
        victim: that process.
        family: ids of every process of the run.
        facts: what was found.

    Returns:
        ``signal``, ``name``, ``verdict`` and ``evidence`` in words; None if the command exited and
        nothing says that the OOM killer struck in the run.
    """
    logged = {pid: line for pid, line in (facts.log or {}).items() if pid in family}
    # Without a log, somebody in the same cgroup has to do; it may be none of the run's.
    if number is None and not logged and (facts.log is not None or not facts.kills):
        return None
    return {
        "signal": number,
        "name": None if number is None else _name(number),
        "verdict": _verdict(number, victim.pid, logged, facts),
        "evidence": [*logged.values(), *_counted(facts), *_memory(victim, facts)],
    }


def _verdict(number: int | None, pid: int, logged: Collection[int], facts: Facts) -> str:
    if number is None:
        if logged:
            named = ", ".join(map(str, sorted(logged)))
            return f"the kernel's OOM killer killed process {named} of the run"
        return "the kernel's OOM killer struck in the command's memory cgroup during the run"
    killed = f"killed by {_name(number)}"
    if number != signal.SIGKILL:
        if facts.passed_on:
            return f"{killed}, which memtrace record had got as well"
        return f"{killed}; {_MEANING.get(number, 'who sent it is unknown')}"
    if pid in logged:
        return f"{killed}; the kernel's log names it: the kernel's OOM killer"
    if facts.log is not None:
        return f"{killed}; not by the kernel's OOM killer, who sent it is unknown"
    if facts.kills:
        return f"{killed}; its cgroup's oom_kill counter rose: the kernel's OOM killer"
    if facts.machine_kills:
        return (
            f"{killed}; the kernel's OOM killer struck on this machine meanwhile, whether at this "
            "process is unknown"
        )
    if facts.kills == 0 or facts.machine_kills == 0:
        return f"{killed}; not by the kernel's OOM killer, who sent it is unknown"
    return f"{killed}; who sent it is unknown"


#: What a signal means that a program mostly gets from its own doing.
_MEANING: dict[int, str] = {
    signal.SIGSEGV: "a crash in native code, unless somebody sent it",
    signal.SIGBUS: "memory that was mapped and isn't there (as when /dev/shm is full)",
    signal.SIGABRT: "native code gave up (abort)",
    signal.SIGFPE: "a crash in native code, unless somebody sent it",
    signal.SIGILL: "native code that this processor doesn't know",
    signal.SIGXCPU: "its limit of processor time",
    signal.SIGXFSZ: "its limit of file size",
}


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _counted(facts: Facts) -> list[str]:
    found = []
    if facts.before is not None and facts.after is not None and facts.kills is not None:
        found.append(
            f"oom_kill of its memory cgroup {facts.after.folder}: {facts.before.kills} at first, "
            f"{facts.after.kills} at the end"
        )
    if facts.machine_kills is not None:
        found.append(f"oom_kill of the whole machine rose by {facts.machine_kills}")
    if facts.log is None:
        found.append("the kernel's log can't be read here")
    return found


def _memory(victim: Victim, facts: Facts) -> list[str]:
    found = []
    if victim.rss is not None and victim.peak is not None:
        found.append(
            f"its RSS was {format_size(victim.rss)} when last sampled, {victim.unseen_ms} ms "
            f"before its end was seen, and {format_size(victim.peak)} at most"
        )
    if facts.after is not None and facts.after.limit is not None:
        used = "unknown" if facts.after.used is None else format_size(facts.after.used)
        found.append(
            f"its memory cgroup may hold {format_size(facts.after.limit)} and held {used} when "
            "last looked at"
        )
    if facts.available is not None:
        found.append(
            f"the machine had {format_size(facts.available)} available when last looked at"
        )
    return found


def _available() -> int | None:
    with suppress(OSError), open("/proc/meminfo", "rb", buffering=0) as file:
        value = file.read(256).partition(b"MemAvailable:")[2].split(maxsplit=1)
        return int(value[0]) * 1024 if value else None
    return None


def _open_log() -> int | None:
    """The kernel's log from now on; None where it can't be read or speaks of other ids."""
    try:
        if os.readlink("/proc/self/ns/pid") != _FIRST_NAMESPACE:
            return None
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(log, 0, os.SEEK_END)
    except OSError:
        return None
    return log


def _read_log(log: int) -> dict[int, str] | None:
    """What the log says of processes that were killed since it was opened; closes it.

    None: some of it was overwritten before it could be read, and the rest names nobody.
    """
    found = {}
    whole = True
    while True:
        try:
            record = os.read(log, 8192).decode(errors="replace")
        except BrokenPipeError:  # overwritten; the next one is there
            whole = False
            continue
        except OSError:  # nothing more
            break
        text = record.partition(";")[2].partition("\n")[0]
        match = _KILLED.search(text)
        if match:
            found[int(match[1])] = f"the kernel's log: {text}"
    os.close(log)
    return found if whole or found else None
