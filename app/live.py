"""Follow runs that are being recorded: the page is drawn anew once there is more to read."""

import time
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import streamlit as st

from app.load import version
from memtrace.errors import TraceError
from memtrace.trace.manifest import read_manifest

_EVERY = 2.0  # seconds
#: Of a long run that is read anew, at most one part in so many of the time.
_SHARE = 5


def recording(folders: Sequence[str]) -> dict[str, Hashable]:
    """The runs that are being recorded, or whose recorder was killed, and their versions."""
    return {folder: version(folder) for folder in folders if _running(folder)}


def _running(folder: str) -> bool:
    try:
        return read_manifest(Path(folder)).get("state") == "running"
    except TraceError:
        return False  # the page says what is wrong with it


def follow(versions: Mapping[str, Hashable], took: float) -> None:
    """Draw the whole page anew when one of these runs has changed.

    Args:
        versions: what :func:`recording` gave before the runs were read.
        took: how many seconds the page took.
    """
    if versions:
        every = max(_EVERY, _SHARE * took)
        st.fragment(_look, run_every=every)(versions, time.monotonic() + every / 2)


def _look(versions: Mapping[str, Hashable], after: float) -> None:
    """Called as the page is drawn too, and not to do anything then."""
    if time.monotonic() < after:
        return
    if any(version(folder) != known for folder, known in versions.items()):
        st.rerun()
