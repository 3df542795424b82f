"""The stand-in libraries: when they are built, and where they are kept."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memtrace.errors import MemtraceError
from memtrace.virtual_gpu import libraries
from memtrace.virtual_gpu.torches import find_torch, read_torch

BUILD = """
from memtrace.virtual_gpu.libraries import build
from memtrace.virtual_gpu.torches import find_torch
print(*build(find_torch()).libraries)
"""


def test_they_are_built_once(cache: Path) -> None:
    first = libraries.build(find_torch())
    times = [path.stat().st_mtime_ns for path in first.libraries]
    again = libraries.build(find_torch())
    assert again == first
    assert [path.stat().st_mtime_ns for path in again.libraries] == times


def test_a_changed_source_builds_them_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = libraries.build(find_torch())
    changed = tmp_path / "src"
    shutil.copytree(libraries._SOURCES, changed)
    with (changed / "cublas.c").open("a") as file:
        file.write("/* changed */\n")
    monkeypatch.setattr(libraries, "_SOURCES", changed)
    after = libraries.build(find_torch())
    assert after.libraries[0].parent != before.libraries[0].parent
    assert all(path.is_file() for path in before.libraries + after.libraries)


def test_a_compiler_that_fails_is_quoted(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "src"
    shutil.copytree(libraries._SOURCES, broken)
    (broken / "device.c").write_text("no C at all\n")
    monkeypatch.setattr(libraries, "_SOURCES", broken)
    with pytest.raises(MemtraceError, match=r"cc says: .*device\.c:1"):
        libraries.build(find_torch())
    assert not [path for path in cache.rglob("tmp*")]


def test_two_processes_build_them_together(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    processes = [
        subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = {process.communicate(timeout=60)[0] for process in processes}
    assert len(told) == 1
    assert all(Path(path).is_file() for path in told.pop().split())
    assert (
        len([path for path in (tmp_path / "memtrace/virtual_gpu").iterdir() if path.is_dir()]) == 1
    )


def test_a_cache_that_cant_be_preloaded_from_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    with pytest.raises(MemtraceError, match="a blank or a colon"):
        libraries.build(find_torch())


def test_a_torch_that_isnt_built_for_cuda_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "version.py").write_text("__version__ = '2.14.1+cpu'\ncuda: Optional[str] = None\n")
    with pytest.raises(MemtraceError, match=r"torch 2\.14\.1\+cpu .* is not built for CUDA"):
        read_torch(folder)


def test_what_isnt_torch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemtraceError, match="no PyTorch"):
        read_torch(tmp_path)
