"""Starts the recorder inside a Python process of a recorded command, before the user's code.

Most such processes never import torch (launchers, package managers, helpers of multiprocessing).
They get a folder in the run, a first manifest, and a hook that waits for torch: one or two
milliseconds in all. So nothing here imports ``json``, ``pathlib`` or ``typing`` at the start, which
would cost more than the interpreter itself.
"""

import os
import sys

from memtrace.record.enter import enter_run
from memtrace.record.imports import when_imported

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import ModuleType
    from typing import Any

#: The environment that makes a Python process record itself.
RUN = "MEMTRACE_RUN"  # absolute path of the run
EPOCH = "MEMTRACE_EPOCH_NS"  # perf_counter_ns() of the launcher: one clock for all processes
OPTIONS = "MEMTRACE_OPTIONS"  # keyword arguments of Session, as JSON

_BOOTSTRAP = os.path.join(os.path.dirname(__file__), "bootstrap")


def environment(run: "Path", epoch_ns: int, options: "Mapping[str, Any]") -> "dict[str, str]":
    """Ours, and what makes a Python process record itself into ``run``."""
    import json

    paths = os.environ.get("PYTHONPATH")
    others = [path for path in paths.split(os.pathsep) if path != _BOOTSTRAP] if paths else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([_BOOTSTRAP, *others]),
        RUN: str(run),
        EPOCH: str(epoch_ns),
        OPTIONS: json.dumps(options),
    }


_waiting: "Waiting | None" = None


def start() -> None:
    """Record this process, and every one forked from it, from its first import of torch.

    Raises:
        OSError: the run isn't there or can't be written.
    """
    global _waiting
    if _waiting is None:  # else two installations of memtrace, one recording the other's launcher
        _waiting = Waiting(os.environ[RUN], int(os.environ[EPOCH]), os.environ[OPTIONS])
        os.register_at_fork(after_in_child=_waiting.forked)
        when_imported("torch", _waiting.record)


class Waiting:
    """A process of the run that has not imported torch yet."""

    def __init__(self, run: str, epoch_ns: int, options: str) -> None:
        self._run = run
        self._epoch_ns = epoch_ns
        self._options = options
        self._folder = enter_run(run)
        self._over = False

    def forked(self) -> None:
        """In a forked child: introduce it too. A session that records follows forks by itself."""
        if not self._over:
            try:
                self._folder = enter_run(self._run)
            except OSError as error:
                self._over = True
                _say(error)

    def record(self, torch: "ModuleType") -> None:
        """Begin to record in the thread that imported torch, or say why that can't be."""
        if self._over:
            return
        self._over = True
        if "MEMTRACE_VIRTUAL_GPU" in os.environ:
            from memtrace.virtual_gpu.child import enter

            enter(torch)
        elif "MEMTRACE_FAKE_GPU" in os.environ:
            from memtrace.fake_gpu.child import enter

            enter(torch)
        import json
        from pathlib import Path

        folder = Path(self._folder)
        try:
            from memtrace.record.session import Session

            Session(folder, epoch_ns=self._epoch_ns, **json.loads(self._options)).start()
        except Exception as error:  # whatever it was, the user's program must run
            _fail(folder, error)


def _fail(folder: "Path", error: Exception) -> None:
    """Keep in the manifest, and say, why this process has torch but no recording."""
    from contextlib import suppress

    from memtrace.errors import TraceError
    from memtrace.trace.manifest import read_manifest, write_manifest

    reason = str(error) or type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        reason += f"; install it for {sys.executable}"
    with suppress(OSError, TraceError):
        write_manifest(folder, {**read_manifest(folder), "state": "failed", "reason": reason})
    _say(reason)


def _say(reason: object) -> None:
    print(f"memtrace: process {os.getpid()} is not recorded: {reason}", file=sys.stderr)
