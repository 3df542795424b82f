"""The stand-in libraries: built by the system's compiler on first use, kept in the user's cache.

A stand-in has the name (SONAME) and the symbol version of the library that it stands for, so that
the loader takes it in that one's place; a library without the version would be ignored silently.
Which symbols PyTorch wants is read from its own libraries: those that no source of ours defines are
generated, so that none is missing at its first use.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from memtrace.errors import MemtraceError
from memtrace.virtual_gpu.torches import Torch

_SOURCES = Path(__file__).parent / "src"

#: The driver's stand-in holds all state; the others are linked to it.
_DRIVER = "libcuda.so.1"

#: In a folder of stand-ins: what PyTorch's kernels were compiled for, such as "80 86 90".
_ARCHITECTURES = "architectures"


@dataclass(frozen=True)
class _Library:
    """One stand-in.

    Attributes:
        name: its SONAME, without the number where that is the symbol version's.
        sources: files in ``src``.
        exports: what the names of its symbols begin with.
        otherwise: body of a function that no source defines.
    """

    name: str
    sources: tuple[str, ...]
    exports: tuple[str, ...]
    otherwise: str


def _refusal(what: str, code: int) -> str:
    return f'vgpu_say_once("the virtual GPU has no {what}"); return {code};'


#: Linked in this order. Those without a number take it, and their symbols, from what PyTorch wants.
_LIBRARIES = (
    _Library(
        _DRIVER,
        ("device.c", "errors.c", "memory.c", "vmm.c", "streams.c", "graphs.c", "driver.c"),
        ("cu", "vgpu_"),
        "return NOT_SUPPORTED;",
    ),
    _Library("libnvidia-ml.so.1", ("nvml.c",), ("nvml",), ""),
    _Library(
        "libcudart.so",
        ("runtime_device.c", "runtime_memory.c", "runtime_streams.c", "runtime_kernels.c"),
        ("cuda", "__cuda"),
        "return NOT_SUPPORTED;",
    ),
    _Library("libcublas.so", ("cublas.c",), ("cublas",), "return OK;"),
    _Library("libcublasLt.so", ("cublaslt.c",), ("cublasLt",), "return OK;"),
    # The numbers are each library's status for what it doesn't support.
    _Library("libcusolver.so", (), ("cusolver",), _refusal("cuSOLVER (torch.linalg)", 9)),
    _Library("libcusparse.so", ("cusparse.c",), ("cusparse",), _refusal("cuSPARSE", 10)),
    _Library("libcufft.so", (), ("cufft",), _refusal("cuFFT (torch.fft)", 16)),
)


@dataclass(frozen=True)
class StandIns:
    """Built libraries, in the order to load them, and the architectures of PyTorch's kernels."""

    libraries: tuple[Path, ...]
    architectures: tuple[int, ...]


def build(torch: Torch) -> StandIns:
    """The stand-ins for a PyTorch; they are built if the cache hasn't them.

    Raises:
        MemtraceError: there is no compiler, it failed, or the cache can't be used.
    """
    folder = _cache() / f"{torch.version}-{_key(torch)}"
    if set(str(folder)) & set(" \t\n:"):  # LD_PRELOAD has no way to write such a path
        raise MemtraceError(
            f"the virtual GPU's libraries can't be in {folder.parent}: a path with a blank or a "
            "colon can't be preloaded; set XDG_CACHE_HOME to another folder"
        )
    try:
        if not folder.is_dir():
            _build_once(torch, folder)
        numbers = (folder / _ARCHITECTURES).read_text(encoding="ascii").split()
        names = [name for library in _LIBRARIES for name in folder.glob(f"{library.name}*")]
    except OSError as error:
        raise MemtraceError(
            f"the virtual GPU's libraries can't be kept in {folder.parent}: {error.strerror}; set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from None
    return StandIns(tuple(names), tuple(map(int, numbers)))


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "memtrace", "virtual_gpu").absolute()


def _key(torch: Torch) -> str:
    """What the stand-ins follow from: this module, the sources and PyTorch's libraries."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    for path in torch.libraries():
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _build_once(torch: Torch, folder: Path) -> None:
    """Build into ``folder``; it appears complete or not at all."""
    for program in ("cc", "nm"):
        if shutil.which(program) is None:
            raise MemtraceError(
                f"the virtual GPU's libraries are built on first use, and there is no {program} "
                "on PATH; install a C compiler (gcc or clang, with binutils)"
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        FileLock(folder.parent / "lock"),
        tempfile.TemporaryDirectory(dir=folder.parent) as scratch,
    ):
        if folder.is_dir():  # another process has built it meanwhile
            return
        made = Path(scratch, "made")
        made.mkdir()
        _build(torch, made, Path(scratch))
        made.rename(folder)


def _build(torch: Torch, folder: Path, scratch: Path) -> None:
    wanted = _undefined_symbols(torch)
    for library in _LIBRARIES:
        name, symbols = library.name, set[str]()
        if name == _DRIVER:
            symbols = _driver_symbols(torch, wanted)
        elif name.endswith(".so"):
            name = _versioned(torch, name, wanted)
            symbols = wanted[name]
        _link(torch, library, name, symbols, folder, scratch)
    numbers = " ".join(map(str, torch.architectures()))
    (folder / _ARCHITECTURES).write_text(numbers, encoding="ascii")


def _versioned(torch: Torch, name: str, wanted: Iterable[str]) -> str:
    """``libcudart.so`` → ``libcudart.so.13``, as PyTorch's libraries call that version of it."""
    for version in wanted:
        if version.startswith(name):
            return version
    raise MemtraceError(
        f"torch {torch.version} is not linked to {name}, so the virtual GPU can't stand in for "
        "that; use a wheel from pytorch.org or PyPI"
    )


def _undefined_symbols(torch: Torch) -> Mapping[str, set[str]]:
    """What PyTorch's libraries want of others, by symbol version ("" for none)."""
    found: dict[str, set[str]] = {}
    for path in torch.libraries():
        for line in _run(["nm", "-D", "--undefined-only", str(path)]).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            found.setdefault(version, set()).add(symbol)
    return found


def _driver_symbols(torch: Torch, wanted: Mapping[str, set[str]]) -> set[str]:
    """The driver's functions: those linked, and those looked up by name, where one missing is fatal
    to PyTorch."""
    pattern = r"cu(?!File)[A-Z][a-z]+[A-Z]\w+"
    linked = {symbol for symbol in wanted.get("", ()) if re.fullmatch(pattern, symbol)}
    content = (torch.folder / "lib" / "libc10_cuda.so").read_bytes()
    looked_up = re.findall(rb"\0(%b)(?=\0)" % pattern.encode(), content)
    return linked | {symbol.decode() for symbol in looked_up}


def _link(
    torch: Torch, library: _Library, name: str, symbols: Iterable[str], folder: Path, scratch: Path
) -> None:
    """Compile one library: its sources, and weak functions for the other symbols."""
    generated = scratch / f"{name}.c"
    lines = ['#include "vgpu.h"']
    if library.otherwise:
        lines += [
            f"EXPORT __attribute__((weak)) int {symbol}(void) {{ {library.otherwise} }}"
            for symbol in sorted(symbols)
        ]
    generated.write_text("\n".join(lines) + "\n", encoding="ascii")
    # A library of the runtime's kind names its symbols' version after itself.
    version = "" if name == library.name else name
    exports = " ".join(f"{prefix}*;" for prefix in library.exports)
    script = scratch / f"{name}.map"
    script.write_text(f"{version} {{ global: {exports} local: *; }};\n", encoding="ascii")
    command = ["cc", "-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
    command += [f"-I{_SOURCES}", f"-DCUDA_VERSION={torch.cuda_number}"]
    command += [str(_SOURCES / source) for source in library.sources]
    command += [str(generated), "-o", str(folder / name), f"-Wl,-soname,{name}"]
    command += [f"-Wl,--version-script={script},-z,defs", "-ldl"]
    if name != _DRIVER:
        command += [str(folder / _DRIVER), "-Wl,-rpath,$ORIGIN"]
    _run(command)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise MemtraceError(
            f"the virtual GPU's libraries can't be built, {command[0]} says: {said[0]}"
        )
    return done.stdout
