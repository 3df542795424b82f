"""Ctrl-C, put off while a recorder is at work in the thread that Python interrupts."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: What programs make exceptions of.
_RAISING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """What Python does about a signal it does when the block has ended."""
    if threading.current_thread() is not threading.main_thread():  # nothing is raised in others
        yield
        return
    arrived: list[int] = []
    before = {}
    try:
        for number in _RAISING:
            handler = signal.getsignal(number)
            if callable(handler):  # Python code
                before[number] = handler
                signal.signal(number, lambda number, _: arrived.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)


@contextmanager
def uninterruptible() -> Iterator[None]:
    """At the end of a process Ctrl-C changes nothing, and would only print a stack trace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if before is not None:  # else C code handles it
            signal.signal(signal.SIGINT, before)
