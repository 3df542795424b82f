"""Which PyTorch a command will import, and what its files say, without importing it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memtrace.errors import MemtraceError

_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_FIND = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"


@dataclass(frozen=True)
class Torch:
    """An installed PyTorch.

    Attributes:
        folder: where it is.
        version: such as ``2.14.1+cu130``.
        cuda: the version of CUDA that it was built for, such as ``13.0``.
    """

    folder: Path
    version: str
    cuda: str

    @property
    def cuda_number(self) -> int:
        """``13.0`` → 13000, as CUDA writes versions."""
        major, _, minor = self.cuda.partition(".")
        return 1000 * int(major) + 10 * int(minor)

    def libraries(self) -> list[Path]:
        """Its own shared libraries."""
        return sorted(self.folder.glob("lib/*.so"))

    def architectures(self) -> list[int]:
        """What its kernels were compiled for, such as [80, 90]; empty if it doesn't say."""
        content = (self.folder / "lib" / "libtorch_python.so").read_bytes()
        flags = re.search(rb"\0((?:(?:sm|compute)_\d+a? ?)+)\0", content)
        return sorted(
            {int(number) for number in re.findall(rb"sm_(\d+)", flags[1])} if flags else ()
        )


def find_torch(command: Sequence[str] = ()) -> Torch:
    """The PyTorch that a command will import: of its interpreter if it names one, else of ours.

    Raises:
        MemtraceError: there is none, or it is no build for CUDA.
    """
    return read_torch(_folder(command))


def version_of(command: Sequence[str] = ()) -> str:
    """The version of the PyTorch that a command will import, whatever it was built for.

    Raises:
        MemtraceError: there is none.
    """
    return _said(_folder(command), "__version__") or "of an unknown version"


def _folder(command: Sequence[str]) -> Path:
    interpreter = _interpreter(command) or sys.executable
    origin = _ask(interpreter)
    if not origin:
        raise MemtraceError(
            f"{interpreter} has no torch; the virtual GPU needs PyTorch's build for CUDA"
        )
    return Path(origin).parent


def read_torch(folder: Path) -> Torch:
    """A PyTorch by its folder.

    Raises:
        MemtraceError: it is no build for CUDA.
    """
    said = _said(folder, "__version__") or "of an unknown version"
    cuda = _said(folder, "cuda")
    if cuda is None:
        raise MemtraceError(
            f"torch {said} in {folder.parent} is not built for CUDA, which the virtual GPU needs; "
            "install the ordinary Linux wheel (pip install torch)"
        )
    return Torch(folder, said, cuda)


def _said(folder: Path, name: str) -> str | None:
    """What a PyTorch's ``version.py`` says under a name; None: nothing.

    Raises:
        MemtraceError: there is no such file.
    """
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError as error:
        raise MemtraceError(f"{folder} is no PyTorch: {error.strerror}") from None
    found = re.search(rf"^{name}\b.*= *['\"](\d.*)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def _interpreter(command: Sequence[str]) -> str | None:
    """The Python that a command starts, directly or by its first line; None if it isn't plain."""
    program = shutil.which(command[0]) if command else None
    if program is None:
        return None
    program = os.path.abspath(program)  # it is asked from another folder
    if _PYTHON.fullmatch(os.path.basename(program)):
        return program
    try:
        with open(program, "rb") as file:
            line = file.readline(512)
    except OSError:
        return None
    words = line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
    if words and _PYTHON.fullmatch(os.path.basename(words[0])):
        return words[0]
    return None


def _ask(interpreter: str) -> str:
    """Where an interpreter finds torch; empty if it doesn't."""
    try:
        done = subprocess.run(
            [interpreter, "-c", _FIND],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd="/",  # where "-c" looks first
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.splitlines()
    return lines[-1] if lines and done.returncode == 0 else ""
