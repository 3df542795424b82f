"""Trees of processes: each in a stream of its own, in one run."""

import json
import os
import venv
from pathlib import Path

import pytest

from memtrace.analysis.summary import summarise
from memtrace.render import report, to_text
from tests.record.launching import LINGER, PYTHON, SCRIPTS, Launch, wait_until


def report_of(launch: Launch) -> str:
    return to_text(report(summarise(launch.trace()), top=0), width=200)


def test_children_are_recorded_whatever_starts_them(tmp_path: Path) -> None:
    launch = Launch(tmp_path, PYTHON, SCRIPTS / "family.py")
    result = launch.run()
    assert result.returncode == 0, result.stderr
    family = {kind: int(pid) for kind, pid in map(str.split, result.stdout.splitlines())}
    processes = launch.trace().processes
    assert set(family) == {
        "parent",
        "fork",
        "spawn",
        "forkserver",
        "os.fork",
        "subprocess",
        "shell",
        "exec",
    }
    assert set(family.values()) <= {process.pid for process in processes}
    # exec keeps the process id, and gets a folder of its own all the same
    assert family["exec"] == family["parent"]
    first, second = (p for p in processes if p.pid == family["exec"])
    assert second.folder.name == f"{first.folder.name}-2"
    assert first.folder.name == f"{first.pid}-{first.manifest['start_ticks']}"
    assert second.manifest["argv"][-1] == "exec"
    assert all(process.manifest["state"] == "started" for process in processes)


def test_another_interpreter_is_recorded(tmp_path: Path) -> None:
    # GIVEN an environment in which neither memtrace nor anything else is installed
    venv.create(tmp_path / "other", symlinks=True, with_pip=False)
    python = tmp_path / "other" / "bin" / "python"
    # WHEN it runs below a shell
    code = "import importlib.util as u; print(u.find_spec('pyarrow'), u.find_spec('torch'))"
    launch = Launch(tmp_path, "sh", "-c", f'"{python}" -c "{code}"; true')
    result = launch.run()
    # THEN it is recorded, and sees no more packages than before
    assert result.returncode == 0
    assert result.stdout == "None None\n"
    (process,) = launch.trace().processes
    assert process.manifest["executable"] == str(python)


def test_a_recording_inside_a_recording(tmp_path: Path) -> None:
    inner = Launch(tmp_path, PYTHON, "-c", "print('deep'); raise SystemExit(5)", name="inner")
    outer = Launch(tmp_path, *inner.arguments, name="outer")
    result = outer.run()
    assert (result.returncode, result.stdout) == (5, "deep\n")
    (launcher,) = outer.trace().processes
    (program,) = inner.trace().processes
    assert program.manifest["parent_pid"] == launcher.pid


def test_descendants_are_sampled_while_the_command_runs(tmp_path: Path) -> None:
    # GIVEN a shell with a child in which no recorder starts
    launch = Launch(tmp_path, "sh", "-c", f"{PYTHON} -I -c 'input()'; true")
    with launch.start() as process:
        # WHEN it runs THEN both are in the trace, which can be read meanwhile
        wait_until((launch.folder / "samples.arrow").exists)
        wait_until(lambda: len(set(launch.trace().samples["pid"])) == 2)
        assert launch.trace().manifest["state"] == "running"
        process.communicate("\n", timeout=30)
    assert process.returncode == 123
    assert len(launch.trace().manifest["process_peak"]) == 2


def test_a_child_that_outlives_the_command(tmp_path: Path) -> None:
    # GIVEN a command that leaves a child behind, which ends when we say so
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = "import sys; open(sys.argv[1]).read()"
    launch = Launch(
        tmp_path, "sh", "-c", f"{PYTHON} -c '{code}' {fifo} >/dev/null 2>&1 & sleep 0.5"
    )
    # WHEN the command ends
    assert launch.run().returncode == 0
    # THEN the recording ends with it, says who still ran, and stays readable when that one ends
    (running,) = launch.trace().manifest["still_running"]
    assert os.path.exists(f"/proc/{running}")
    assert not any(name.startswith(f"{running}/") for name in launch.trace().manifest["files"])
    fifo.write_text("now")
    wait_until(lambda: not os.path.exists(f"/proc/{running}"))
    assert launch.trace().complete


def test_children_of_bash_stand_side_by_side(tmp_path: Path) -> None:
    code = f"import sys, time; time.sleep({LINGER}); print(sys.argv[1])"
    launch = Launch(
        tmp_path, "bash", "-c", f'"{PYTHON}" -c "{code}" a & "{PYTHON}" -c "{code}" b; wait'
    )
    assert launch.run().returncode == 0
    summary = summarise(launch.trace())
    assert sorted(process.argv[-1] for process in summary.processes) == ["a", "b"]
    assert all(process.memory.peak for process in summary.processes)
    (bash,) = summary.unrecorded
    assert (Path(bash.argv[0]).name, bash.reason) == ("bash", "not Python")


def test_children_that_can_not_be_recorded_are_named(tmp_path: Path) -> None:
    # GIVEN a program that starts children which keep the recorder out, each in its own way
    code = f"import time; time.sleep({LINGER})"
    commands = {
        "-I": [PYTHON, "-I", "-c", code],
        "-S": [PYTHON, "-qS", "-c", code],
        "-E": [PYTHON, "-W", "ignore", "-E", "-c", code],
        "environment": ["env", "-i", PYTHON, "-c", code],
        "not Python": ["sleep", "0.6"],
    }
    program = (
        "import json, subprocess, sys;"
        "started = [subprocess.Popen(command) for command in json.loads(sys.argv[1])];"
        "print(*[child.pid for child in started]);"
        "[child.wait() for child in started]"
    )
    launch = Launch(tmp_path, PYTHON, "-c", program, json.dumps(list(commands.values())))
    # WHEN it is recorded
    result = launch.run()
    # THEN each is listed with what it ran and why, and was sampled
    found = {one.pid: one for one in summarise(launch.trace()).unrecorded}
    for (word, command), pid in zip(commands.items(), result.stdout.split(), strict=True):
        one = found.pop(int(pid))
        assert list(one.argv) == command[command.index("-i") + 1 :] if "-i" in command else command
        assert word in (one.reason or "")
        assert (one.rss_peak or 0) > 0
    assert found == {}
    assert "1 process recorded, 4 of Python could not be, peak RSS" in result.stderr
    # AND the report says so
    text = " ".join(report_of(launch).split())
    assert "not recorded: Python with -I," in text


def test_the_sum_of_processes_that_overlap_and_of_some_that_don_t(tmp_path: Path) -> None:
    # GIVEN two processes with a large array each, one after the other
    code = f"import time; x = bytearray(100 << 20); time.sleep({LINGER})"
    launch = Launch(tmp_path, "sh", "-c", f"{PYTHON} -c '{code}'; {PYTHON} -c '{code}'; true")
    assert launch.run().returncode == 0
    # THEN their peaks add up to what was never there at once
    rss = summarise(launch.trace()).sums["rss"]
    assert rss.of_peaks > 200 << 20
    assert 100 << 20 < rss.peak < 160 << 20


RANKS = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
mine = torch.ones((1 + rank) << 20, dtype=torch.uint8)
dist.barrier()
total = torch.tensor([rank])
dist.all_reduce(total)
assert total.item() == 1
dist.barrier()
dist.destroy_process_group()
"""


def test_torchrun_with_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch = Launch(tmp_path, *torchrun, "ranks.py")
    result = launch.run()
    assert result.returncode == 0, result.stderr
    # THEN each rank has its own books, named after it
    trace = launch.trace()
    ranks = {p.manifest["rank"]: p for p in trace.processes if "rank" in p.manifest}
    assert set(ranks) == {0, 1}
    for rank, process in ranks.items():
        manifest = process.manifest
        assert process.folder.name == f"{process.pid}-{manifest['start_ticks']}-rank{rank}"
        assert (manifest["local_rank"], manifest["world_size"]) == (rank, 2)
        assert manifest["state"] == "ended"
        assert (1 + rank) << 20 in process.events["bytes"]
    # AND both held theirs at once, which the sums say
    summary = summarise(trace)
    peaks = {one.pid: one.peak.allocated for one in summary.accounts}
    booked = summary.sums["allocated:cpu"]
    assert booked.of_peaks == sum(peaks.values())
    assert 3 << 20 <= booked.peak <= booked.of_peaks
    assert " 1 " in report_of(launch)


REUSE = """
import os, subprocess, sys, time

def child(size):
    code = f"import time; x = bytearray({size} << 20); time.sleep({sys.argv[1]})"
    return subprocess.Popen([sys.executable, "-c", code, str(size)])

first = child(100)
first.wait()
with open("/proc/sys/kernel/ns_last_pid", "w") as file:
    file.write(str(first.pid - 1))
second = child(1)
second.wait()
print(first.pid, second.pid)
"""


def test_a_process_id_that_is_used_again(tmp_path: Path) -> None:
    # GIVEN two children that have the same process id one after the other
    (tmp_path / "reuse.py").write_text(REUSE)
    launch = Launch(tmp_path, PYTHON, "reuse.py", str(LINGER))
    # in process ids of their own, so that nobody else takes it in between
    launch.arguments = ["unshare", "--pid", "--fork", "--mount-proc", *launch.arguments]
    try:
        result = launch.run()
    except FileNotFoundError:
        pytest.skip("there is no unshare(1)")
    if result.returncode:
        pytest.skip(f"choosing a process id needs root: {result.stderr.splitlines()[-1]}")
    first, second = result.stdout.split()
    assert first == second
    # THEN they are two processes, and each has its own memory
    summary = summarise(launch.trace())
    peaks = {p.argv[-1]: p.memory.peak for p in summary.processes if str(p.pid) == first}
    assert set(peaks) == {"100", "1"}
    assert (peaks["100"] or 0) > 100 << 20 > 50 << 20 > (peaks["1"] or 0) > 0
    assert len({p.folder for p in summary.processes}) == 3


def test_a_process_that_sees_another_id_of_its_own(tmp_path: Path) -> None:
    """As in a container that the command starts: its id is another process's outside."""
    code = f"import os, time; time.sleep({LINGER}); print(os.getpid())"
    launch = Launch(tmp_path, "unshare", "--pid", "--fork", PYTHON, "-c", code)
    try:
        result = launch.run()
    except FileNotFoundError:
        pytest.skip("there is no unshare(1)")
    if result.returncode:
        pytest.skip("a namespace of process ids needs root")
    # THEN nothing of the process that has the id here is taken for its own
    assert result.stdout == "1\n"
    (process,) = launch.trace().processes
    assert process.pid == 1
    assert 1 not in launch.trace().samples["pid"]
    reasons = [one.reason for one in summarise(launch.trace()).unrecorded]
    assert "it has another process id, 1, in a namespace of its own" in reasons
