"""The command line itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from memtrace.cli import main


def test_help_answers_without_loading_anything_heavy() -> None:
    code = (
        "import sys; from memtrace.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "examples:" in done.stdout
    loaded = set(done.stderr.split())
    assert loaded.isdisjoint({"torch", "numpy", "pyarrow", "rich", "streamlit", "transformers"})


def test_the_package_s_names_are_imported_on_first_use() -> None:
    code = (
        "import sys, memtrace; print(*sys.modules, file=sys.stderr)\n"
        "print(memtrace.dry_run.__module__, memtrace.record_here.__module__, "
        "hasattr(memtrace, 'nothing'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "memtrace.dryrun memtrace.record.here False\n"
    assert not [name for name in done.stderr.split() if name.startswith("memtrace.")]


@pytest.mark.parametrize("command", ["record", "report", "compare", "view", "classify"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"memtrace {command}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["recrod"], ["report"], ["compare", "one"]])
def test_wrong_usage_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "usage: memtrace" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_said_in_a_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "memtrace", "devices"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "memtrace: the output can't be written: No space left on device\n"


def test_a_closed_output_is_no_error() -> None:
    command = f"{sys.executable} -m memtrace devices >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_who_reads_no_further_is_no_error() -> None:
    command = f"{sys.executable} -m memtrace devices | true"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.stderr == ""
