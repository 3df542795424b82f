"""However a recorded program ends, its trace is kept; and signals go where they should."""

import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from memtrace.trace.reader import Trace, open_trace
from memtrace.trace.schema import Action
from tests.record.launching import PYTHON, SCRIPTS, Launch, lines, notices, wait_until

#: What a trace may lose of a program that dies, in seconds.
LOSS = 1.0


def _steps_recorded(trace: Trace) -> int:
    """Tensors of steps.py that the trace holds."""
    (process,) = trace.processes
    events = process.events
    action = np.asarray(process.contexts["action"])[events["context"]]
    return int(((action == Action.ALLOC) & (events["bytes"] == 4000)).sum())


def _holds_all_but_the_last_second(launch: Launch, log: Path) -> None:
    steps = [float(line) for line in lines(log)]
    trace = launch.trace()
    expected = sum(step < steps[-1] - LOSS for step in steps)
    assert _steps_recorded(trace) >= expected
    assert trace.processes[0].manifest["state"] == "recording"
    # and process memory was seen to the end
    last_us = int(steps[-1] * 1e6) - trace.manifest["epoch_ns"] // 1000
    assert max(trace.samples["time_us"]) > last_us - LOSS * 1e6


def _kill_after(seconds: float, cwd: Path) -> None:
    log = cwd / "log"
    launch = Launch(cwd, PYTHON, SCRIPTS / "steps.py", log)
    with launch.start() as process:
        wait_until(lambda: len(lines(log)) > 0, 60)
        time.sleep(seconds)
        (program,) = launch.trace().processes
        os.kill(program.pid, signal.SIGKILL)
        process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL
    assert launch.trace().manifest["exit"] == {"code": None, "signal": signal.SIGKILL}
    _holds_all_but_the_last_second(launch, log)


def test_a_killed_program(tmp_path: Path) -> None:
    _kill_after(1.5, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_program_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    _kill_after(random.Random(seed).uniform(0, 3), tmp_path)


@pytest.mark.parametrize(("end", "expected"), [("segfault", 139), ("exit", 4)])
def test_a_program_that_crashes_or_leaves_at_once(end: str, expected: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    launch = Launch(tmp_path, PYTHON, SCRIPTS / "steps.py", log, "1.5", end)
    assert launch.run().returncode == expected
    _holds_all_but_the_last_second(launch, log)


def test_a_program_that_ends_before_torch_has_loaded(tmp_path: Path) -> None:
    launch = Launch(tmp_path, PYTHON, "-c", "import os, signal; os.kill(os.getpid(), 9)")
    assert launch.run().returncode == 137
    assert launch.trace().processes[0].manifest["state"] == "started"


def test_a_killed_launcher(tmp_path: Path) -> None:
    # GIVEN a program under a launcher that is killed
    log = tmp_path / "log"
    launch = Launch(tmp_path, PYTHON, SCRIPTS / "signals.py", log)
    process = subprocess.Popen(launch.arguments, cwd=tmp_path)
    wait_until(lambda: lines(log) == ["ready"])
    time.sleep(LOSS)
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    # THEN the program goes on
    (program,) = launch.trace().processes
    os.kill(program.pid, signal.SIGUSR1)
    wait_until(lambda: lines(log) == ["ready", "SIGUSR1"])
    os.kill(program.pid, signal.SIGTERM)
    # AND what was sampled can be read
    trace = launch.trace()
    assert trace.manifest["state"] == "running"
    assert not trace.complete
    assert set(trace.samples["pid"]) == {program.pid}


class TestSignalsSentToTheLauncher:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_reach_a_program_that_dies_of_them(self, number: int, tmp_path: Path) -> None:
        log = tmp_path / "log"
        code = (
            f"import pathlib, time; pathlib.Path({str(log)!r}).write_text('.\\n'); time.sleep(60)"
        )
        launch = Launch(tmp_path, PYTHON, "-c", code)
        with launch.start() as process:
            wait_until(lambda: lines(log) != [])
            process.send_signal(number)
            process.communicate(timeout=30)
        assert process.returncode == 128 + number
        trace = launch.trace()
        assert trace.complete
        assert trace.manifest["exit"] == {"code": None, "signal": number}

    def test_reach_a_program_that_handles_them(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        launch = Launch(tmp_path, PYTHON, SCRIPTS / "signals.py", log)
        expected = ["ready"]
        with launch.start() as process:
            wait_until(lambda: lines(log) == expected)
            for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
                process.send_signal(number)
                expected.append(number.name)
                wait_until(lambda: lines(log) == expected)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
        assert process.returncode == 7
        assert lines(log) == [*expected, "SIGTERM"]
        assert launch.trace().manifest["exit"] == {"code": 7, "signal": None}

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_reach_a_program_though_another_thread_takes_them(
        self, number: int, tmp_path: Path
    ) -> None:
        # GIVEN a process that has a thread which blocks no signal, and records
        log, run = tmp_path / "log", tmp_path / "run.memtrace"
        code = (
            "import sys, threading, time\n"
            "from pathlib import Path\n"
            "from memtrace.record.launcher import record\n"
            "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
            f"raise SystemExit(record([sys.executable, {str(SCRIPTS / 'signals.py')!r}, "
            f"{str(log)!r}], Path({str(run)!r}), quiet=True))"
        )
        with subprocess.Popen([PYTHON, "-c", code]) as process:
            wait_until(lambda: lines(log) == ["ready"])
            # WHEN it gets a signal THEN so does the program, and the launcher goes on
            process.send_signal(number)
            wait_until(lambda: lines(log)[1:] == [signal.Signals(number).name])
            if number == signal.SIGINT:
                assert process.poll() is None
                process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 7
        assert open_trace(run).complete


class TestATerminal:
    """Keys reach the program once, from the terminal itself, and never end the launcher."""

    def _on_terminal(self, launch: Launch) -> "tuple[subprocess.Popen[bytes], int]":
        """Start it as a shell starts a job: in the foreground group of a terminal."""
        ours, terminal = os.openpty()
        process = subprocess.Popen(
            [PYTHON, SCRIPTS / "terminal.py", *launch.arguments],
            cwd=launch.cwd,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        return process, ours

    def test_ctrl_c(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        launch = Launch(tmp_path, PYTHON, SCRIPTS / "signals.py", log)
        shell, terminal = self._on_terminal(launch)
        wait_until(lambda: lines(log) == ["ready"])
        expected = ["ready"]
        for _ in range(2):
            os.write(terminal, b"\x03")
            expected.append("SIGINT")
            wait_until(lambda: len(lines(log)) >= len(expected))
            time.sleep(0.2)  # time for one too many to arrive
            assert lines(log) == expected
        (program,) = launch.trace().processes
        os.kill(program.pid, signal.SIGTERM)
        assert shell.wait(30) == 7
        assert launch.trace().complete
        os.close(terminal)

    def test_ctrl_z_stops_both_until_the_shell_goes_on(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        launch = Launch(tmp_path, PYTHON, SCRIPTS / "signals.py", log)
        shell, terminal = self._on_terminal(launch)
        wait_until(lambda: lines(log) == ["ready"])
        (program,) = launch.trace().processes
        launcher = program.manifest["parent_pid"]
        os.write(terminal, b"\x1a")
        wait_until(lambda: _state(launcher) == _state(program.pid) == "T")
        os.kill(shell.pid, signal.SIGCONT)  # terminal.py's `fg`
        wait_until(lambda: _state(launcher) != "T" != _state(program.pid))
        os.kill(launcher, signal.SIGTERM)
        assert shell.wait(30) == 7
        assert launch.trace().complete
        os.close(terminal)

    def test_hanging_up(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        launch = Launch(tmp_path, PYTHON, SCRIPTS / "signals.py", log)
        shell, terminal = self._on_terminal(launch)
        wait_until(lambda: lines(log) == ["ready"])
        (program,) = launch.trace().processes
        # WHEN the window is closed, which ends the shell
        os.close(terminal)
        assert shell.wait(30) == -signal.SIGHUP
        # THEN the program hears of it, and goes on as it chose to
        wait_until(lambda: "SIGHUP" in lines(log))
        os.kill(program.pid, signal.SIGTERM)
        # AND the launcher finishes its work, with nobody left to tell
        wait_until(lambda: launch.trace().complete)
        assert lines(log).count("SIGHUP") == 1


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_full_disk_does_not_reach_the_program(tmp_path: Path) -> None:
    # GIVEN room for the first samples only, on any machine: no file may grow beyond 2 KiB
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))

    # WHEN the program runs for longer than that lasts
    launch = Launch(tmp_path, PYTHON, "-c", "import time; time.sleep(1.2); print('done')")
    result = subprocess.run(
        launch.arguments,
        cwd=tmp_path,
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=60,
    )
    # THEN it doesn't notice, the user hears of it once, and what was written can be read
    assert (result.returncode, result.stdout) == (0, "done\n")
    assert [notice for notice in notices(result.stderr) if "can't be written" in notice] == [
        "memtrace: the trace is incomplete, run can't be written: File too large"
    ]
    trace = launch.trace()
    assert trace.complete
    assert len(trace.samples["pid"]) > 0
    assert trace.torn
