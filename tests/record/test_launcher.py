"""``memtrace record``: what it runs, what it returns, what it leaves."""

import json
import os
import subprocess
import sys
import venv
from contextlib import suppress
from pathlib import Path

import pytest

from memtrace.trace.reader import open_trace
from tests.record.launching import PYTHON, SCRIPTS, Launch, notices, wait_until

IF_RECORDED = "import os\nif 'MEMTRACE_RUN' in os.environ:"


@pytest.mark.parametrize(
    "command",
    [
        [PYTHON, str(SCRIPTS / "surroundings.py"), "-x", "--", "a b"],
        [PYTHON, "-X", "utf8", "-m", "surroundings", "--output", "y"],
        [PYTHON, "-c", (SCRIPTS / "surroundings.py").read_text(), "z"],
    ],
    ids=["script", "module", "code"],
)
def test_the_program_can_not_tell(command: list[str], tmp_path: Path) -> None:
    # GIVEN what a program sees of itself when it runs plainly
    environment = {"PYTHONPATH": str(SCRIPTS)}
    plain = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **environment},
        input="some text",
        capture_output=True,
        text=True,
        check=True,
    )
    # WHEN it is recorded
    launch = Launch(tmp_path, *command)
    recorded = launch.run(stdin="some text", environment=environment)
    # THEN it sees the same
    assert recorded.returncode == 0
    assert json.loads(recorded.stdout) == json.loads(plain.stdout)


def test_a_program_that_is_not_python_inherits_the_same_signals(tmp_path: Path) -> None:
    command = ["grep", "^Sig[BI]", "/proc/self/status"]  # blocked and ignored

    def standard(text: str) -> list[int]:
        """Signals 1 to 31. Above are two of libc's own, which posix_spawn leaves ignored."""
        return [int(line.split()[1], 16) & 0x7FFFFFFF for line in text.splitlines()]

    plain = subprocess.check_output(command, text=True)
    recorded = Launch(tmp_path, *command).run().stdout
    assert standard(recorded) == standard(plain) != []


@pytest.mark.parametrize(
    ("code", "expected"), [("pass", 0), ("raise SystemExit(3)", 3), ("raise ValueError", 1)]
)
def test_the_exit_code_is_the_programs(code: str, expected: int, tmp_path: Path) -> None:
    launch = Launch(tmp_path, PYTHON, "-c", code)
    assert launch.run().returncode == expected
    assert launch.trace().manifest["exit"] == {"code": expected, "signal": None}


def test_says_once_where_the_trace_is_and_stays_off_stdout(tmp_path: Path) -> None:
    result = Launch(tmp_path, PYTHON, "-c", "print('mine')").run()
    assert result.stdout == "mine\n"
    (notice,) = result.stderr.splitlines()
    assert notice.startswith("memtrace: 1 process recorded, peak RSS ")
    assert notice.endswith("; see memtrace report run")


def test_quiet(tmp_path: Path) -> None:
    assert Launch(tmp_path, PYTHON, "-c", "pass", options=["-q"]).run().stderr == ""


def test_the_run_is_named_after_the_script(tmp_path: Path) -> None:
    (tmp_path / "infer.py").touch()
    launch = Launch(tmp_path, PYTHON, "-u", "infer.py")
    launch.arguments[launch.arguments.index("-o") : launch.arguments.index("--")] = []
    with subprocess.Popen(launch.arguments, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        pass
    assert open_trace(tmp_path / f"infer-{process.pid}").complete


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["true"], 123),
        (["false"], 1),
        ([PYTHON, "-I", "-c", "pass"], 123),
        ([PYTHON, "-I", "-c", "raise SystemExit(3)"], 3),
    ],
)
def test_no_recorder_could_start(command: list[str], expected: int, tmp_path: Path) -> None:
    launch = Launch(tmp_path, *command)
    result = launch.run()
    assert result.returncode == expected
    (notice,) = notices(result.stderr)
    assert notice.startswith(f"memtrace: no recorder started in {command[0]}")
    trace = launch.trace()
    assert trace.complete
    assert trace.processes == ()


def test_process_memory_is_sampled_where_no_recorder_starts(tmp_path: Path) -> None:
    code = "import time; x = bytearray(50 << 20); time.sleep(0.2)"
    launch = Launch(tmp_path, PYTHON, "-I", "-c", code)
    assert launch.run().returncode == 123
    samples = launch.trace().samples
    rss = [v for v, s in zip(samples["value"], samples["source"], strict=True) if s == "rss"]
    assert max(rss) > 50 << 20


@pytest.mark.parametrize(
    ("command", "expected", "reason"),
    [
        (["no-such-program"], 127, "No such file or directory"),
        (["./no-such-program"], 127, "No such file or directory"),
        (["."], 126, "Permission denied"),
        (["infer.py"], 127, "No such file or directory; write memtrace record -- python infer.py"),
    ],
)
def test_a_command_that_can_not_run(
    command: list[str], expected: int, reason: str, tmp_path: Path
) -> None:
    launch = Launch(tmp_path, *command)
    result = launch.run()
    assert result.returncode == expected
    assert result.stderr == f"memtrace: {command[0]} can't be run: {reason}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--interval", "0"], ["--stacks", "-1"], ["--stacks=x"]])
def test_wrong_usage(options: list[str], tmp_path: Path) -> None:
    assert Launch(tmp_path, options=options).run().returncode == 2
    assert list(tmp_path.iterdir()) == []


class TestAnOutputThatExists:
    @pytest.fixture
    def old(self, tmp_path: Path) -> Path:
        launch = Launch(tmp_path, PYTHON, "-c", "pass", "the old one")
        assert launch.run().returncode == 0
        return launch.folder

    def test_is_kept(self, old: Path) -> None:
        marker = old.parent / "started"
        result = Launch(old.parent, "touch", marker).run()
        assert result.returncode == 125
        assert result.stderr == (
            "memtrace: run exists; choose another name with -o or replace it with --force\n"
        )
        assert not marker.exists()
        assert open_trace(old).manifest["command"][-1] == "the old one"

    def test_is_replaced_by_force(self, old: Path) -> None:
        result = Launch(old.parent, PYTHON, "-c", "pass", "the new one", options=["--force"]).run()
        assert result.returncode == 0
        trace = open_trace(old)
        assert trace.manifest["command"][-1] == "the new one"
        assert len(trace.processes) == 1
        assert list(old.parent.iterdir()) == [old]

    def test_comes_back_if_the_command_can_not_run(self, old: Path) -> None:
        assert Launch(old.parent, "no-such-program", options=["--force"]).run().returncode == 127
        assert open_trace(old).manifest["command"][-1] == "the old one"
        assert list(old.parent.iterdir()) == [old]

    @pytest.mark.parametrize("kind", ["folder", "file"])
    def test_that_is_no_run_is_never_replaced(self, kind: str, tmp_path: Path) -> None:
        precious = tmp_path / "run"
        if kind == "folder":
            precious.mkdir()
            precious = precious / "thesis.tex"
        precious.write_text("years of work")
        result = Launch(tmp_path, PYTHON, "-c", "pass", options=["--force"]).run()
        assert result.returncode == 125
        (notice,) = notices(result.stderr)
        assert notice.startswith("memtrace: --force replaces only runs of memtrace: ")
        assert precious.read_text() == "years of work"


def test_an_output_that_can_not_be_made(tmp_path: Path) -> None:
    # GIVEN a file where the output's parent should be
    (tmp_path / "run").touch()
    marker = tmp_path / "started"
    # WHEN
    result = Launch(tmp_path, "touch", marker, name="run/inside").run()
    # THEN the command is not started
    assert result.returncode == 125
    assert result.stderr == "memtrace: run/inside can't be made: Not a directory\n"
    assert not marker.exists()


def test_start_up_loads_next_to_nothing(tmp_path: Path) -> None:
    """What a recorded Python process without torch pays: no json, re, pathlib, typing, pyarrow."""
    code = "import sys; print(*sys.modules)"
    plain = subprocess.check_output([PYTHON, "-c", code], text=True)
    recorded = Launch(tmp_path, PYTHON, "-c", code).run().stdout
    assert set(recorded.split()) - set(plain.split()) == {
        "memtrace",
        "memtrace.record",
        "memtrace.record.child",
        "memtrace.record.enter",
        "memtrace.record.imports",
        "memtrace.trace",
        "_json",
        "zlib",
    }


def test_the_users_sitecustomize_and_usercustomize_run(tmp_path: Path) -> None:
    # GIVEN an interpreter with a user site (a virtual environment has none)
    python = Path(sys.base_prefix) / "bin" / "python3"
    customs = tmp_path / "customs"
    user_site = subprocess.check_output(
        [python, "-c", "import site; print(site.getusersitepackages())"],
        env={**os.environ, "PYTHONUSERBASE": str(tmp_path / "base")},
        text=True,
    ).strip()
    for folder, name in ((customs, "sitecustomize"), (Path(user_site), "usercustomize")):
        folder.mkdir(parents=True)
        # not in the launcher, which is a Python program as well
        (folder / f"{name}.py").write_text(f"{IF_RECORDED} print('{name}')\n")
    # WHEN
    launch = Launch(tmp_path, python, "-c", "import sitecustomize; print(sitecustomize.__file__)")
    result = launch.run(
        environment={"PYTHONPATH": str(customs), "PYTHONUSERBASE": str(tmp_path / "base")}
    )
    # THEN both ran, in order, and the recorder as well
    assert result.stdout.split() == [
        "sitecustomize",
        "usercustomize",
        str(customs / "sitecustomize.py"),
    ]
    assert len(launch.trace().processes) == 1


def test_an_error_in_the_users_sitecustomize_looks_as_ever(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"{IF_RECORDED} raise RuntimeError('mine')\n")
    launch = Launch(tmp_path, PYTHON, "-c", "print('goes on')", options=["-q"])
    result = launch.run(environment={"PYTHONPATH": str(tmp_path)})
    assert result.stdout == "goes on\n"
    assert result.stderr == (
        "Error in sitecustomize; set PYTHONVERBOSE for traceback:\nRuntimeError: mine\n"
    )
    assert len(launch.trace().processes) == 1


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


def test_a_torch_that_can_not_be_recorded(tmp_path: Path) -> None:
    # GIVEN a torch that is none
    (tmp_path / "torch.py").write_text("value = 1\n")
    # WHEN
    launch = Launch(tmp_path, PYTHON, "-c", "import torch; print(torch.value, torch.__loader__)")
    result = launch.run()
    # THEN the program runs on, the reason is said once, and the run doesn't pass as recorded
    assert result.stdout.startswith("1 <_frozen_importlib_external.SourceFileLoader")
    assert result.returncode == 123
    (process,) = launch.trace().processes
    assert process.manifest["state"] == "failed"
    reason = process.manifest["reason"]
    first, _ = notices(result.stderr)
    assert first == f"memtrace: process {process.pid} is not recorded: {reason}"


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


def test_the_closing_line_as_json(tmp_path: Path) -> None:
    code = "import time; time.sleep(0.3); raise SystemExit(3)"  # long enough to be sampled
    launch = Launch(tmp_path, PYTHON, "-c", code, options=["--json"])
    result = launch.run()
    (program,) = launch.trace().processes
    document = json.loads(result.stderr)
    peaks = document.pop("process_peak")
    assert peaks[str(program.pid)] > 1 << 20
    assert document == {
        "schema": 1,
        "run": str(launch.folder),
        "exit": {"code": 3, "signal": None},
        "recorded": True,
        "processes": [program.pid],
    }


def test_force_leaves_a_run_alone_that_is_being_recorded(tmp_path: Path) -> None:
    # GIVEN a recording
    first = Launch(tmp_path, PYTHON, "-c", "input()")
    process = first.start()
    wait_until(lambda: any(first.folder.glob("*/manifest.json")))
    # WHEN another one is to replace it
    result = Launch(tmp_path, PYTHON, "-c", "pass", options=["--force"]).run()
    # THEN it isn't started, and the first one ends as if nothing had been
    assert result.returncode == 125
    assert result.stderr == "memtrace: run is being recorded right now\n"
    process.communicate("\n", timeout=30)
    assert process.returncode == 0
    assert first.trace().complete


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


def test_a_full_disk(tmp_path: Path) -> None:
    # GIVEN a disk of one page more than the first manifest needs
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        code = "print('done'); raise SystemExit(3)"
        launch = Launch(tmp_path, PYTHON, "-c", code, name="disk/run")
        # WHEN it fills
        (disk / "ballast").write_bytes(bytes(8192))
        result = launch.run()
        # THEN the program doesn't notice, and the trace holds what there was room for
        assert (result.returncode, result.stdout) == (3, "done\n")
        assert any("can't be written: No space left on device" in n for n in notices(result.stderr))
        assert launch.trace().manifest["state"] == "running"
        # AND a run that can't even begin isn't begun
        with suppress(OSError), (disk / "more").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        launch = Launch(tmp_path, PYTHON, "-c", "print('started')", name="disk/other")
        result = launch.run()
        assert (result.returncode, result.stdout) == (125, "")
        assert result.stderr == "memtrace: disk/other can't be made: No space left on device\n"
        assert not launch.folder.exists()
    finally:
        subprocess.run(["umount", disk], check=True)


class TestWithTorch:
    """One recorded program, seen from several sides."""

    CODE = (
        "import torch, resource, pathlib;"
        "kept = torch.ones(16 << 20, dtype=torch.uint8);"
        "spike = torch.ones(512 << 20, dtype=torch.uint8);"
        "del spike;"
        "print(pathlib.Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])"
    )

    @pytest.fixture(scope="class")
    @staticmethod
    def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
        launch = Launch(
            tmp_path_factory.mktemp("torch"),
            PYTHON,
            "-c",
            TestWithTorch.CODE,
            options=["--stacks", "2", "--interval", "1000"],
        )
        result = launch.run()
        assert result.returncode == 0, result.stderr
        (launch.cwd / "hwm").write_text(result.stdout)
        return launch

    def test_tensors_are_recorded(self, launch: Launch) -> None:
        (process,) = launch.trace().processes
        assert process.manifest["state"] == "ended"
        assert process.manifest["stacks"] == 2
        assert {16 << 20, 512 << 20} <= set(process.events["bytes"].tolist())

    def test_the_peak_is_exact_even_between_samples(self, launch: Launch) -> None:
        (peak,) = launch.trace().manifest["process_peak"].values()
        # The program read its own high-water mark after its spike, which nothing later exceeds.
        assert peak == int((launch.cwd / "hwm").read_text()) * 1024

    def test_both_sides_share_one_clock(self, launch: Launch) -> None:
        trace = launch.trace()
        (process,) = trace.processes
        spike = process.events["bytes"].tolist().index(512 << 20)
        samples = trace.samples["time_us"]
        # The last sample is at most one interval before the end.
        assert min(samples) < process.events["time_us"][spike] < max(samples) + 1_000_000
