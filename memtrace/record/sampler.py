"""Samples the processes of a run from outside: RSS from ``/proc`` and GPU memory from NVML.

From outside, so a process that hangs, crashes or is killed is measured to its end, and neither
torch nor the recorder pays for it.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns, sleep, thread_time_ns
from typing import TYPE_CHECKING, Any

from memtrace.record.death import Witness
from memtrace.record.nvml import Nvml
from memtrace.record.process import children, high_water, stat
from memtrace.record.unrecorded import COPY, UNKNOWN, Reason, command_line, why

if TYPE_CHECKING:
    from memtrace.trace.writer import TableWriter

#: Looking for descendants, high-water marks and NVML cost more than RSS: every so many samples.
_RARELY = 5
#: Sampling takes at most this share of one core, however many processes there are.
_SHARE = 0.05
#: The arguments of a program can be read a moment after it was started.
_LOOKS, _LOOK_SECONDS = 20, 0.0001
#: The folders that processes make in a run.
_FOLDER = re.compile(r"(\d+)-(\d+)")
#: What a killed launcher can lose at most.
_FLUSH_NS = 500_000_000
_COLUMNS = ("time_us", "pid", "source", "event", "value")


@dataclass
class Seen:
    """A process of the run, from its first sample to its last."""

    pid: int
    start_ticks: int
    parent_pid: int
    peak: int = 0  # highest RSS, in bytes
    rss: int = 0  # the last one
    time_us: int | None = None  # of that
    argv: list[str] = field(default_factory=list)
    reason: Reason = UNKNOWN  # why no recorder can start in it, or did

    @property
    def life(self) -> str:
        """Names the process for good: ``PID-START``, as the folders of recorded ones begin."""
        return f"{self.pid}-{self.start_ticks}"

    def described(self) -> dict[str, Any]:
        """What the manifest keeps of it."""
        keys = ("pid", "start_ticks", "parent_pid", "argv")
        found = {key: getattr(self, key) for key in keys}
        return {**found, "python": self.reason.python, "reason": self.reason.text}


class Sampler:
    """Samples a process, its descendants and every process with a folder in the run.

    Args:
        run: the folder of the run; rows go to its ``samples`` table.
        pid: the command's process.
        epoch_ns: ``perf_counter_ns()`` that counts as time 0.
        interval_ms: time between two samples; more when there are too many processes for it.
        nvml: the GPUs to read; None where the run has nothing to do with those of this machine.
    """

    def __init__(
        self, run: Path, pid: int, *, epoch_ns: int, interval_ms: int, nvml: Nvml | None = None
    ) -> None:
        self._run = run
        self._epoch_ns = epoch_ns
        self._interval_ns = interval_ms * 1_000_000
        self._next_ns = perf_counter_ns()
        self._flush_ns = self._next_ns + _FLUSH_NS
        self._ticks = 0
        self._folders: set[str] = set()
        self._recorded: set[str] = set()
        self._rows: list[tuple[int, int | None, str, None, int]] = []
        self._writer: TableWriter | None = None
        self._nvml = nvml
        self._witness = Witness()
        #: Every process that was found, the command first.
        self.seen: list[Seen] = []
        #: Those that lived at the last sample, by process id.
        self.alive: dict[int, Seen] = {}
        #: Why samples are no longer written, if they aren't.
        self.failure: OSError | None = None
        self._enter(pid)
        for _ in range(_LOOKS):
            self._identify(self.command)  # now: it may end before the first sample
            if self.command.argv:
                break
            sleep(_LOOK_SECONDS)

    @property
    def command(self) -> Seen:
        """The process of the command itself."""
        return self.seen[0]

    @property
    def witness(self) -> Witness:
        """What may tell of the command's death."""
        return self._witness

    @property
    def peaks(self) -> Mapping[str, int]:
        """Highest RSS of each process that was sampled in time, in bytes, by its life."""
        return {seen.life: seen.peak for seen in self.seen if seen.peak}

    def wait_seconds(self) -> float:
        """Time until the next sample is due."""
        return max(0.0, (self._next_ns - perf_counter_ns()) / 1e9)

    def sample(self) -> None:
        """Take a sample if one is due; write what was taken twice a second."""
        start_ns = perf_counter_ns()
        if start_ns < self._next_ns:
            return
        cpu_ns = thread_time_ns()
        rarely = self._ticks % _RARELY == 0
        self._ticks += 1
        self._enter_recorded()
        if rarely:
            self._enter_descendants()
            self._witness.look(self.command.pid)
        for pid, seen in list(self.alive.items()):
            now = stat(pid)
            if now is None or now.start_ticks != seen.start_ticks or now.ended:
                del self.alive[pid]
                continue
            if not now.rss:  # it begins or ends
                continue
            seen.rss = now.rss
            seen.time_us = self._add(pid, "rss", now.rss)
            seen.peak = max(seen.peak, now.rss)
            if rarely:
                if hwm := high_water(pid):
                    self._add(pid, "hwm", hwm)
                    seen.peak = max(seen.peak, hwm)
                if seen.life not in self._recorded:
                    self._identify(seen)
        if rarely and self._nvml is not None:
            for pid_or_none, source, value in self._nvml.read(self.alive):
                self._add(pid_or_none, source, value)
        cpu_ns = thread_time_ns() - cpu_ns
        self._next_ns = start_ns + max(self._interval_ns, round(cpu_ns / _SHARE))
        if start_ns >= self._flush_ns:
            self._flush()
            self._flush_ns = start_ns + _FLUSH_NS

    def _add(self, pid: int | None, source: str, value: int) -> int:
        time_us = (perf_counter_ns() - self._epoch_ns) // 1000
        self._rows.append((time_us, pid, source, None, value))
        return time_us

    def _enter(self, pid: int) -> bool:
        """Sample a process from now on; whether it wasn't already."""
        now = stat(pid)
        known = self.alive.get(pid)
        if now is None or (known is not None and known.start_ticks == now.start_ticks):
            return False
        if now.ended and self.seen:
            return False
        seen = Seen(pid, now.start_ticks, now.parent)
        self.seen.append(seen)
        self.alive[pid] = seen
        # The samples that follow are this process's, also if its id was another one's before.
        self._add(pid, "start", now.start_ticks)
        return True

    def _enter_recorded(self) -> None:
        """Processes that have made a folder in the run, whoever their parent is."""
        with suppress(OSError):  # somebody may have moved the run away
            for name in os.listdir(self._run):
                if name in self._folders:
                    continue
                self._folders.add(name)
                found = _FOLDER.match(name)
                if found is None:
                    continue
                pid, ticks = map(int, found.groups())
                self._recorded.add(f"{pid}-{ticks}")
                now = stat(pid)
                # It may have ended, or have its id from another namespace, where ours is another's.
                if now is not None and now.start_ticks == ticks:
                    self._enter(pid)

    def _enter_descendants(self) -> None:
        """Children of those that are known, recorded or not."""
        found = list(self.alive)
        for pid in found:  # grows while it is walked
            for child in children(pid):
                if child not in self.alive and self._enter(child):
                    found.append(child)

    def _identify(self, seen: Seen) -> None:
        """Learn what a process runs, and why it isn't recorded, while it can be asked."""
        argv = command_line(seen.pid)
        if not argv or argv == seen.argv:
            return
        seen.argv = argv
        parent = self.alive.get(seen.parent_pid)
        copied = parent is not None and argv == (parent.argv or command_line(parent.pid))
        seen.reason = COPY if copied else why(seen.pid, argv)

    def _open(self) -> "TableWriter":
        # pyarrow and NVML take a while to load: by now the command runs and was sampled once.
        from memtrace.trace.writer import TableWriter

        if self._nvml is not None:
            self._nvml.open()
        return TableWriter(self._run)

    def _flush(self) -> None:
        if self._writer is None:
            self._writer = self._open()
        rows, self._rows = self._rows, []
        if self.failure is not None or not rows:
            return
        columns = dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True))
        try:
            self._writer.append("samples", columns)
        except OSError as error:
            self.failure = error

    def survivors(self) -> set[int]:
        """Processes of the run that live now."""
        self._enter_recorded()
        self._enter_descendants()
        return {
            pid
            for pid, seen in self.alive.items()
            if (now := stat(pid)) and now.start_ticks == seen.start_ticks and not now.ended
        }

    def close(self) -> None:
        """Write the rest and end the table."""
        self._flush()
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self.failure = self.failure or error
