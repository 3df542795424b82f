"""The folder that ``memtrace record`` writes, and places where it can't."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from memtrace.trace.reader import open_trace
from tests.record.launching import PYTHON, Launch, notices, wait_until


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


def test_the_run_is_named_after_the_script(tmp_path: Path) -> None:
    (tmp_path / "infer.py").touch()
    launch = Launch(tmp_path, PYTHON, "-u", "infer.py")
    launch.arguments[launch.arguments.index("-o") : launch.arguments.index("--")] = []
    with subprocess.Popen(launch.arguments, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        pass
    assert open_trace(tmp_path / f"infer-{process.pid}").complete


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own; ``make_read_only`` closes it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a disk needs root")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def make_read_only(disk: Path) -> bool:
    """False while a file on it is being written."""
    command = ["mount", "-o", "remount,ro", disk]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_a_folder_that_can_only_be_read(read_only: Path, tmp_path: Path) -> None:
    assert make_read_only(read_only)
    result = Launch(tmp_path, PYTHON, "-c", "print('started')", name="disk/run").run()
    assert (result.returncode, result.stdout) == (125, "")
    assert result.stderr == "memtrace: disk/run can't be made: Read-only file system\n"


def test_a_folder_that_can_only_be_read_from_some_moment_on(
    read_only: Path, tmp_path: Path
) -> None:
    # GIVEN a program that starts a child once it is told to
    code = (
        "import subprocess, sys; input();"
        "subprocess.run([sys.executable, '-c', 'print(1)'], check=True); raise SystemExit(3)"
    )
    launch = Launch(tmp_path, PYTHON, "-c", code, name="disk/run")
    with launch.start() as process:
        wait_until(lambda: any(launch.folder.glob("*/manifest.json")))
        # WHEN its run can't be written any more
        wait_until(lambda: make_read_only(read_only))
        out, err = process.communicate("\n", timeout=30)
    # THEN neither of them notices, and the user hears why the trace isn't whole
    assert (process.returncode, out) == (3, "1\n")
    assert "is not recorded: [Errno 30] Read-only file system" in err
    assert "the trace is incomplete, disk/run can't be written: Read-only file system" in err
    assert launch.trace().manifest["state"] == "running"
