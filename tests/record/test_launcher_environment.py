"""What a recorded program sees of its surroundings: what it would see without us."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.record.launching import PYTHON, SCRIPTS, Launch

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
