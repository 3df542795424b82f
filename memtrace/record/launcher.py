"""Run a command with the recorder inside it, and sample its processes from outside.

The command runs as it would without us: same terminal, process group, standard streams, working
directory and arguments. A signal from the terminal reaches it directly; one that is sent to the
launcher is passed on. The launcher lives until the command has ended, whatever arrives.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrace.errors import MemtraceError, TraceError
from memtrace.record import child
from memtrace.record.closing import Processes, document, obstacle, summary, was_recorded
from memtrace.record.death import Victim, death
from memtrace.record.nvml import Nvml
from memtrace.record.process import high_water
from memtrace.record.sampler import Sampler, Seen
from memtrace.record.signals import Signals, blocked
from memtrace.trace import SUFFIX
from memtrace.trace.manifest import (
    file_checksums,
    first_manifest,
    life,
    read_manifest,
    timestamp,
    write_manifest,
)

if TYPE_CHECKING:
    from memtrace.virtual_gpu.launch import VirtualGpu

#: Exit codes of the launcher itself: 125 to 127 as env(1) and timeout(1) have them, 123 ours.
USAGE, NOT_RECORDED, FAILED, NOT_EXECUTABLE, NOT_FOUND = 2, 123, 125, 126, 127

_STDOUT, _STDERR = 1, 2

#: How soon the command's end and signals to the launcher are noticed.
_POLL_SECONDS = 0.01

#: How long processes may outlive the command and still end inside the recording. Helpers of
#: multiprocessing end when they notice that it has.
_GRACE_SECONDS = 0.2


class LaunchError(MemtraceError):
    """The command was not started."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def record(
    command: Sequence[str],
    run: Path | None = None,
    *,
    force: bool = False,
    stacks: int = 0,
    source: str = "auto",
    interval_ms: int = 20,
    quiet: bool = False,
    as_json: bool = False,
    finish: Callable[[Path], Iterable[str]] | None = None,
    virtual_gpu: "VirtualGpu | None" = None,
    notes: Mapping[str, Any] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> int:
    """Run ``command`` to its end and record it.

    Args:
        command: program and arguments.
        run: folder to make; None names it after the script, in the working directory.
        force: replace the run that is there.
        stacks: Python frames kept for each allocation.
        source: what a :class:`~memtrace.record.session.Session` takes by that name.
        interval_ms: time between two samples of process memory.
        quiet: don't say where the trace is.
        as_json: say it as a JSON document, on stderr: stdout is the command's.
        finish: applies rules to the complete run; the lines that it returns are said.
        virtual_gpu: run it on these, virtual or fake ones, instead of the machine's own GPUs.
        notes: what else the run's manifest says, from the start.
        stdout, stderr: file descriptors for what the command prints; None: ours.

    Returns:
        The command's exit code, 128+n if signal n killed it, or 123 if it succeeded but no recorder
        started in it.

    Raises:
        LaunchError: the command was not started, and nothing is left behind.
    """
    if not command:
        raise LaunchError("no command to record; write memtrace record -- python infer.py", USAGE)
    shown = run or Path(f"{_stem(command)}-{os.getpid()}{SUFFIX}")
    with blocked() as mask:
        epoch_ns = time.perf_counter_ns()
        known = _of_virtual(virtual_gpu) | dict(notes or {})
        with _new_run(shown, command, epoch_ns, force, known) as (folder, manifest):
            # Linux counts what a process held before exec in its ru_maxrss, and posix_spawn lends
            # it our memory until then.
            floor = high_water(os.getpid())
            environment = child.environment(folder, epoch_ns, {"stacks": stacks, "source": source})
            if virtual_gpu is not None:
                environment |= virtual_gpu.variables
            pid = _spawn(command, environment, mask, {_STDOUT: stdout, _STDERR: stderr})
        # The machine's own GPUs aren't used where others stand in for them.
        nvml = None if virtual_gpu is not None else Nvml()
        sampler = Sampler(folder, pid, epoch_ns=epoch_ns, interval_ms=interval_ms, nvml=nvml)
        status, max_rss, shared = _watch(pid, sampler)
        code = os.waitstatus_to_exitcode(status)
        died = _death(-code if code < 0 else None, sampler, epoch_ns, shared)
        running = _outlast(sampler)
        sampler.close()
        peaks = _peaks(sampler.peaks, sampler.command.life, max_rss, floor)
        processes = _processes(folder)
        unrecorded = _unrecorded(sampler.seen, processes)
        manifest |= {
            "state": "complete",
            "ended": timestamp(),
            "exit": {"code": code if code >= 0 else None, "signal": -code if code < 0 else None},
            "death": died,
            "process_peak": peaks,
            "still_running": sorted(running),
            "unrecorded": [seen.described() for seen in unrecorded],
            "sampling": {
                "interval_ms": interval_ms,
                "nvml": nvml.status if nvml else "not sampled: the GPU isn't there",
                "gpus": [gpu.described() for gpu in nvml.gpus] if nvml else [],
            },
        }
        failure = _complete(folder, manifest, processes, running) or sampler.failure
        if failure is not None:
            reason = os.strerror(failure.errno) if failure.errno else failure
            _say(f"the trace is incomplete, {shown} can't be written: {reason}")
        elif finish is not None:
            _finish(finish, folder, running & {one.get("pid") for one in processes.values()})
        if as_json:
            print(json.dumps(document(folder, manifest, processes)), file=sys.stderr, flush=True)
        elif not processes:
            _say(
                f"no recorder started in {command[0]} ({obstacle(unrecorded)}), so {shown} holds "
                "process memory only"
            )
        elif not quiet:
            _say(summary(shown, processes, peaks, unrecorded))
        if died is not None and not quiet and not as_json:
            _say(f"{command[0]}: {died['verdict']}")
        if code:
            return code if code > 0 else 128 - code
        return 0 if was_recorded(processes) else NOT_RECORDED


def _of_virtual(gpu: "VirtualGpu | None") -> dict[str, Any]:
    """What the manifest says of virtual GPUs."""
    return {"knowledge": gpu.knowledge, "virtual_gpu": gpu.figures()} if gpu else {}


def _finish(finish: Callable[[Path], Iterable[str]], run: Path, writing: set[int]) -> None:
    if writing:
        _say("processes still write the run, so no rules were applied; use memtrace classify later")
        return
    try:
        for line in finish(run):
            _say(line)
    except MemtraceError as error:
        _say(f"the rules were not applied: {error}")


def _stem(command: Sequence[str]) -> str:
    """``infer`` for ``python -u infer.py --fast``, ``pytest`` for ``/usr/bin/pytest -q``."""
    scripts = (word for word in command if word.endswith(".py") and " " not in word)
    return Path(next(scripts, command[0])).stem or "run"


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(f"memtrace: {text}", file=sys.stderr, flush=True)


@contextmanager
def _new_run(
    shown: Path, command: Sequence[str], epoch_ns: int, force: bool, known: Mapping[str, Any]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Make the folder of a run. If the block fails, it goes and what it replaced comes back.

    Yields:
        The folder's absolute path, and the manifest that is in it.
    """
    replaced: Path | None = None
    with ExitStack() as undo:
        try:
            folder = shown.resolve()
            if folder.exists():
                if not force:
                    raise LaunchError(
                        f"{shown} exists; choose another name with -o or replace it with --force",
                        FAILED,
                    )
                if _is_being_recorded(read_manifest(folder)):
                    raise LaunchError(f"{shown} is being recorded right now", FAILED)
                replaced = folder.with_name(f".{folder.name}.{os.getpid()}")
                folder.rename(replaced)
                undo.callback(replaced.rename, folder)
            folder.mkdir()
            undo.callback(shutil.rmtree, folder)
            manifest = {**first_manifest(command, epoch_ns), **known}
            write_manifest(folder, manifest)
        except TraceError as error:
            raise LaunchError(f"--force replaces only runs of memtrace: {error}", FAILED) from None
        except OSError as error:
            raise LaunchError(f"{shown} can't be made: {error.strerror}", FAILED) from None
        yield folder, manifest
        undo.pop_all()
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _is_being_recorded(manifest: Mapping[str, Any]) -> bool:
    """Whether the recorder of a run still lives; a killed one leaves its run "running" too."""
    return (
        manifest.get("state") == "running"
        and manifest.get("host") == os.uname().nodename
        and os.path.exists(f"/proc/{manifest.get('recorder_pid')}")
    )


def _spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    mask: Iterable[int],
    redirected: Mapping[int, int | None],
) -> int:
    """Start the command and return its process id.

    Args:
        redirected: file descriptors of ours for its own ones; None: the same.
    """
    program = command[0]
    try:
        return os.posix_spawnp(
            program,
            list(command),
            environment,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, ours, theirs)
                for theirs, ours in redirected.items()
                if ours is not None
            ],
            setsigmask=mask,
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # ignored by Python itself
        )
    except OSError as error:
        hint = f"; write memtrace record -- python {program}" if program.endswith(".py") else ""
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        raise LaunchError(f"{program} can't be run: {error.strerror}{hint}", code) from None


def _watch(pid: int, sampler: Sampler) -> tuple[int, int, set[int]]:
    """Sample, and pass signals on, until the command ends.

    Returns:
        Its wait status, its ru_maxrss in bytes, and the signals that reached the launcher as well.
    """
    signals = Signals(pid)
    while True:
        sampler.sample()
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return status, usage.ru_maxrss * 1024, signals.seen
        time.sleep(min(sampler.wait_seconds(), _POLL_SECONDS))
        signals.pass_on()


def _death(
    number: int | None, sampler: Sampler, epoch_ns: int, shared: Container[int]
) -> dict[str, Any] | None:
    """How the command, which ended just now, was ended by signal ``number``; None: it wasn't."""
    command = sampler.command
    unseen_ms = None
    if command.time_us is not None:
        unseen_ms = (time.perf_counter_ns() - epoch_ns) // 1_000_000 - command.time_us // 1000
    return death(
        number,
        Victim(command.pid, command.rss or None, command.peak or None, unseen_ms),
        {seen.pid for seen in sampler.seen},
        sampler.witness.testify(passed_on=number in shared),
    )


def _outlast(sampler: Sampler) -> set[int]:
    """Processes that still run a moment after the command has ended."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while (running := sampler.survivors()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return running


def _peaks(sampled: Mapping[str, int], command: str, max_rss: int, floor: int) -> dict[str, int]:
    """Highest RSS by process: exact for the command where wait4's figure is its own.

    That figure is the largest of the command, of its descendants that were waited for, and of what
    the launcher held (``floor``). It is the command's own if no other reached as high.
    """
    own = sampled.get(command, 0)
    if max_rss > floor and own >= max(sampled.values(), default=0):
        return {**sampled, command: max(own, max_rss)}
    return dict(sampled)


def _processes(run: Path) -> Processes:
    """The manifests of the processes that a recorder started in, by folder."""
    found = {}
    for folder in run.iterdir():
        if folder.is_dir():
            with suppress(TraceError):  # killed before it wrote one
                found[folder.name] = read_manifest(folder)
    return found


def _unrecorded(seen: Iterable[Seen], processes: Processes) -> list[Seen]:
    """Those that were sampled and in which no recorder started."""
    recorded = {life(process) for process in processes.values()}
    return [one for one in seen if one.life not in recorded]


def _complete(
    run: Path, manifest: dict[str, Any], processes: Processes, running: set[int]
) -> OSError | None:
    """Write the last manifest, with checksums of every file that won't change any more."""
    unfinished = {name for name, process in processes.items() if process.get("pid") in running}
    try:
        manifest["files"] = {
            name: file
            for name, file in file_checksums(run).items()
            if name.partition("/")[0] not in unfinished
        }
        write_manifest(run, manifest)
    except OSError as error:
        return error
    return None
