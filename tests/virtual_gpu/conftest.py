"""The virtual GPU's libraries, built once for all tests of this folder."""

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memtrace.errors import MemtraceError
from memtrace.virtual_gpu.torches import find_torch


def obstacle() -> str | None:
    """Why there is no virtual GPU here; None: there is."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the virtual GPU needs Linux on x86-64"
    if shutil.which("cc") is None:
        return "the virtual GPU needs a C compiler"
    if importlib.util.find_spec("torch") is None:
        return "the virtual GPU needs torch"
    try:
        find_torch()
    except MemtraceError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty user cache, which this session's processes share."""
    if reason := obstacle():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield folder
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before
