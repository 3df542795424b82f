"""Who ended a recorded program."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memtrace.analysis.summary import summarise
from memtrace.record.cgroup import Cgroup, counter, memory_cgroup
from memtrace.record.death import Facts, Victim, death
from tests.record.launching import PYTHON, Launch, lines, wait_until

MIB = 1 << 20
VICTIM = Victim(pid=7, rss=200 * MIB, peak=210 * MIB, unseen_ms=15)
LINE = "the kernel's log: Memory cgroup out of memory: Killed process 7 (python) total-vm:1kB"


def cgroup(kills: int | None, limit: int | None = None) -> Cgroup:
    folder = Path("/sys/fs/cgroup/job")
    return Cgroup(folder, kills, limit, folder if limit else None, limit and limit - 4096)


@pytest.mark.parametrize(
    ("number", "facts", "verdict"),
    [
        pytest.param(
            9,
            Facts(log={7: LINE}),
            "killed by SIGKILL; the kernel's log names it: the kernel's OOM killer",
            id="named in the log",
        ),
        pytest.param(
            9,
            Facts(before=cgroup(2), after=cgroup(3), machine_kills=1),
            "killed by SIGKILL; its cgroup's oom_kill counter rose: the kernel's OOM killer",
            id="counted in its cgroup",
        ),
        pytest.param(
            9,
            Facts(before=cgroup(2), after=cgroup(2), machine_kills=1),
            "killed by SIGKILL; the kernel's OOM killer struck on this machine meanwhile, whether "
            "at this process is unknown",
            id="counted on the machine only",
        ),
        pytest.param(
            9,
            Facts(log={99: "another"}, before=cgroup(0), after=cgroup(1), machine_kills=1),
            "killed by SIGKILL; not by the kernel's OOM killer, who sent it is unknown",
            id="the log names others only",
        ),
        pytest.param(
            9,
            Facts(before=cgroup(2), after=cgroup(2), machine_kills=0),
            "killed by SIGKILL; not by the kernel's OOM killer, who sent it is unknown",
            id="nothing was counted",
        ),
        pytest.param(
            9,
            Facts(before=cgroup(None), after=cgroup(None)),
            "killed by SIGKILL; who sent it is unknown",
            id="nothing can be known",
        ),
        pytest.param(
            15,
            Facts(passed_on=True),
            "killed by SIGTERM, which memtrace record had got as well",
            id="passed on",
        ),
        pytest.param(
            11,
            Facts(log={}),
            "killed by SIGSEGV; a crash in native code, unless somebody sent it",
            id="a crash",
        ),
        pytest.param(
            None,
            Facts(log={8: "another of the run"}),
            "the kernel's OOM killer killed process 8 of the run",
            id="a child of the command",
        ),
        pytest.param(
            None,
            Facts(before=cgroup(0), after=cgroup(1)),
            "the kernel's OOM killer struck in the command's memory cgroup during the run",
            id="somebody in its cgroup",
        ),
    ],
)
def test_the_verdict(number: int | None, facts: Facts, verdict: str) -> None:
    found = death(number, VICTIM, {7, 8}, facts)
    assert found is not None
    assert found["verdict"] == verdict
    assert found["signal"] == number


def test_no_death_without_a_signal_or_the_oom_killer() -> None:
    assert death(None, VICTIM, {7}, Facts(machine_kills=1)) is None
    # another process in the same cgroup, says the log
    facts = Facts(log={99: LINE}, before=cgroup(0), after=cgroup(1))
    assert death(None, VICTIM, {7}, facts) is None


def test_the_evidence_says_what_there_was() -> None:
    facts = Facts(
        log={7: LINE}, before=cgroup(0, 256 * MIB), after=cgroup(1, 256 * MIB), available=MIB
    )
    found = death(9, VICTIM, {7}, facts)
    assert found is not None
    assert found["evidence"] == [
        LINE,
        "oom_kill of its memory cgroup /sys/fs/cgroup/job: 0 at first, 1 at the end",
        "its RSS was 200.0 MiB when last sampled, 15 ms before its end was seen, and 210.0 MiB "
        "at most",
        "its memory cgroup may hold 256.0 MiB and held 256.0 MiB when last looked at",
        "the machine had 1.0 MiB available when last looked at",
    ]


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup below ours that may hold 160 MiB."""
    ours = memory_cgroup(Path("/proc/self/cgroup").read_text())
    if ours is None:
        pytest.skip("there is no memory cgroup here")
    folder = ours.folder / f"memtrace-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"a memory cgroup can't be made here: {error.strerror}")
    try:
        limits = [folder / name for name in ("memory.max", "memory.limit_in_bytes")]
        limit = next((file for file in limits if file.exists()), None)
        if limit is None:
            pytest.skip("its parent doesn't let it limit memory")
        limit.write_text(str(160 * MIB))
        for swap in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
            if (folder / swap).exists():
                (folder / swap).write_text("0" if "max" in swap else str(160 * MIB))
        yield folder
    finally:
        wait_until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


def inside(folder: Path, arguments: list[str], cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command in a cgroup."""
    script = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
    return subprocess.run(
        ["sh", "-c", script, "sh", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60
    )


#: Takes 20 MiB every 30 ms, and would stop at 400 MiB.
GROW = "import time\nx = []\nfor _ in range(20): x.append(b'1' * (20 << 20)); time.sleep(0.03)"


def test_a_program_that_the_kernel_kills_for_memory(small_cgroup: Path, tmp_path: Path) -> None:
    # GIVEN a container for the program and its recorder, as small as it gets
    launch = Launch(tmp_path, PYTHON, "-c", GROW)
    # WHEN the program takes more than there is
    result = inside(small_cgroup, launch.arguments, tmp_path)
    # THEN the run says who killed it and from what that is known
    assert result.returncode == 137
    found = summarise(launch.trace()).death
    assert found is not None
    assert (found.signal, found.name) == (signal.SIGKILL, "SIGKILL")
    assert found.verdict.endswith(": the kernel's OOM killer")
    assert found.verdict in result.stderr
    evidence = "\n".join(found.evidence)
    assert f"{small_cgroup}: 0 at first, 1 at the end" in evidence
    assert "may hold 160.0 MiB" in evidence
    assert counter(small_cgroup / "memory.oom_control", "oom_kill") in (1, None)
    # AND memory was seen rising to the end
    (process,) = summarise(launch.trace()).processes
    assert 100 * MIB < (process.memory.peak or 0) < 160 * MIB


def test_a_child_that_the_kernel_kills_for_memory(small_cgroup: Path, tmp_path: Path) -> None:
    """The shell exits with a code of its own, and so does the command."""
    launch = Launch(tmp_path, "sh", "-c", f'{PYTHON} -c "{GROW}"; exit 3')
    assert inside(small_cgroup, launch.arguments, tmp_path).returncode == 3
    found = summarise(launch.trace()).death
    assert found is not None
    assert found.signal is None
    assert found.verdict.startswith("the kernel's OOM killer ")


def test_a_program_that_somebody_kills(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = f"import pathlib, time; pathlib.Path({str(log)!r}).write_text('.\\n'); time.sleep(60)"
    launch = Launch(tmp_path, PYTHON, "-c", code, options=["--json"])
    with launch.start() as process:
        wait_until(lambda: lines(log) != [])
        time.sleep(0.2)
        (program,) = launch.trace().processes
        os.kill(program.pid, signal.SIGKILL)
        _, said = process.communicate(timeout=30)
    found = json.loads(said)["death"]
    assert found["name"] == "SIGKILL"
    assert "its cgroup's oom_kill counter rose" not in found["verdict"]
    assert found["verdict"].endswith("who sent it is unknown")


def test_a_limit_of_address_space_is_no_death(tmp_path: Path) -> None:
    """The program gets a MemoryError, says so itself and exits."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (200 << 20, 200 << 20));"
        "x = bytearray(400 << 20)"
    )
    launch = Launch(tmp_path, PYTHON, "-c", code)
    result = launch.run()
    assert result.returncode == 1
    assert "MemoryError" in result.stderr
    assert summarise(launch.trace()).death is None


def test_a_program_that_gives_up(tmp_path: Path) -> None:
    launch = Launch(tmp_path, PYTHON, "-c", "import os; os.abort()")
    assert launch.run().returncode == 128 + signal.SIGABRT
    found = summarise(launch.trace()).death
    assert found is not None
    assert found.verdict == "killed by SIGABRT; native code gave up (abort)"
