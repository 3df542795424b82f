"""``memtrace record``: what it runs and what it returns."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.record.launching import LINGER, PYTHON, SCRIPTS, Launch, notices


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
    assert notice.startswith(f"memtrace: no recorder started in {command[0]} (")
    if "-I" in command:
        assert "(Python with -I, which keeps the recorder out)" in notice
    trace = launch.trace()
    assert trace.complete
    assert trace.processes == ()


def test_process_memory_is_sampled_where_no_recorder_starts(tmp_path: Path) -> None:
    code = f"import time; x = bytearray(50 << 20); time.sleep({LINGER})"
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


def test_the_closing_line_as_json(tmp_path: Path) -> None:
    code = f"import time; time.sleep({LINGER}); raise SystemExit(3)"
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
        "death": None,
        "recorded": True,
        "processes": [program.pid],
        "unrecorded": [],
    }


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


def test_signals_that_another_thread_takes_are_not_waited_for() -> None:
    """A dry run may be asked for by a program with threads."""
    subprocess.run([PYTHON, SCRIPTS / "threaded.py"], check=True, timeout=60)
