"""Note each signal that arrives in a file; leave with 7 on SIGTERM.

usage: signals.py LOG
"""

import os
import signal
import sys

log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(number, frame):
    os.write(log, f"{signal.Signals(number).name}\n".encode())
    if number == signal.SIGTERM:
        sys.exit(7)


for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, note)
os.write(log, b"ready\n")
signal.alarm(60)  # nobody may be left to end it
while True:
    signal.pause()
