"""Signals to a launcher: held while it waits for its command, and passed on to that."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: What ends a process that doesn't handle it.
_ENDING = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
#: Signals that are waited for. SIGTSTP and its kin are not among them: they stop the launcher
#: together with the command, which is what a shell expects of a job.
_SIGNALS = (signal.SIGCHLD, *_ENDING, signal.SIGCONT)
#: si_code of a signal that the kernel made, as for Ctrl-C: the whole process group has got it.
_SI_KERNEL = 0x80
#: si_code of a signal that one of our threads was sent by another.
_SI_TKILL = -6
#: The command's time to end by itself of a signal that it may have got as well.
_UNSURE_SECONDS = 1.0


@contextmanager
def blocked() -> Iterator[set[int]]:
    """Hold the signals that we wait for; yields the mask from before, which the command gets.

    Threads that a library started before don't block them. What one of these gets is sent on to
    this thread; otherwise it would end the launcher and leave the command behind.
    """
    # A parent that ignores SIGCHLD hands that down, and the command's exit status would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    ours = threading.get_ident()
    before = {number: signal.getsignal(number) for number in _ENDING}
    # What is ignored stays so for the command; what C code handles can't be put back.
    caught = {number: one for number, one in before.items() if one not in (signal.SIG_IGN, None)}
    for number in caught:
        signal.signal(number, lambda number, _: signal.pthread_kill(ours, number))
    try:
        yield mask
    finally:
        list(_pending())  # came after the command's end, and must not change its exit code
        for number, handler in caught.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _pending() -> "Iterator[signal.struct_siginfo]":
    """Take the blocked signals that have arrived.

    One that is pending may be gone when it is taken: a thread that a library started before they
    were blocked can get it. ``sigtimedwait`` isn't given any time, since where stopping and going
    on interrupts it at the end of its time it returns a signal that never was (CPython 3.11 to
    3.13).
    """
    while signal.sigpending() & set(_SIGNALS):
        received = signal.sigtimedwait(_SIGNALS, 0)
        if received is not None:
            yield received


class Signals:
    """Passes signals on to the command.

    Attributes:
        seen: those that reached us.
    """

    def __init__(self, pid: int) -> None:
        self.seen: set[int] = set()
        self._pid = pid
        self._unsure: dict[int, float] = {}

    def pass_on(self) -> None:
        """Pass on what has arrived, and what the command may have got as well a while later."""
        now = time.monotonic()
        due = [number for number, when in self._unsure.items() if when <= now]
        for received in _pending():
            self.seen.add(received.si_signo)
            if received.si_code == _SI_TKILL:  # from a terminal, or sent to us alone
                self._unsure[received.si_signo] = now + _UNSURE_SECONDS
            elif received.si_signo != signal.SIGCHLD and received.si_code != _SI_KERNEL:
                due.append(received.si_signo)
        for number in due:
            self._unsure.pop(number, None)
            with suppress(PermissionError):  # it runs as another user, as sudo does
                os.kill(self._pid, number)
