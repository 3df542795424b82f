"""Follow a recorded process into its threads and forks.

Hooks into the interpreter can't be taken back (register_at_fork) or must not be, since others may
have wrapped them by then: they are set once and ask for the active session each time.
"""

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Protocol

from memtrace.record.ledger import Frame


class Followed(Protocol):
    """A session, as far as threads and forks concern it."""

    def hand_down(self, thread: threading.Thread) -> Frame | None:
        """The frame in which a thread begins that this one starts; None: it isn't recorded."""

    def enter_thread(self, frame: Frame) -> None:
        """The calling thread begins, in ``frame``."""

    def leave_thread(self) -> None:
        """The calling thread ends."""

    def forked(self) -> None:
        """This is a forked child."""

    def close(self) -> None:
        """The process ends."""


_active: Callable[[], Followed | None] | None = None


def follow(active: Callable[[], Followed | None]) -> None:
    """Follow whatever session ``active`` returns, from now on."""
    global _active
    if _active is None:
        _active = active
        _follow_threads(active)
        os.register_at_fork(after_in_child=_after_fork)


def _follow_threads(active: Callable[[], Followed | None]) -> None:
    """Record every thread from its start, first in the scope of the thread that started it."""
    plain_start = threading.Thread.start
    plain_bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    starting: dict[int, tuple[Followed, Frame]] = {}

    @functools.wraps(plain_start)
    def start(thread: threading.Thread) -> None:
        session = active()
        frame = None if session is None else session.hand_down(thread)
        if session is not None and frame is not None:
            starting[id(thread)] = session, frame
        plain_start(thread)

    @functools.wraps(plain_bootstrap)
    def bootstrap(thread: threading.Thread) -> None:
        session, frame = starting.pop(id(thread), (None, None))
        if session is not None and frame is not None and session is active():
            session.enter_thread(frame)
        try:
            plain_bootstrap(thread)
        finally:
            if session is not None:
                session.leave_thread()  # PyTorch must find nothing in a thread that has ended

    threading.Thread.start = start  # type: ignore[method-assign,assignment]
    threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]


def _after_fork() -> None:
    session = None if _active is None else _active()
    if session is None:
        return
    session.forked()
    # A child of multiprocessing leaves through os._exit, so atexit never runs in it; its own
    # finalizers do, once they are registered after it has cleared those of its parent.
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.register_after_fork(
            session, lambda held: util.Finalize(None, held.close, exitpriority=-100)
        )
