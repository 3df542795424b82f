"""How a process introduces itself to the run that it belongs to.

Runs at the start of every recorded Python process, so it imports only what is there already or
costs nothing; see :mod:`memtrace.record.child`.
"""

import os
import sys
import zlib
from _json import encode_basestring_ascii  # the C function that json.dumps uses

from memtrace.trace import FORMAT, MANIFEST, SCHEMA


def enter_run(run: str) -> str:
    """Make this process's folder in the run, with its first manifest.

    Returns:
        ``RUN/PID``, or ``RUN/PID-2`` and so on for a program that replaced another one by exec.

    Raises:
        OSError: the run isn't there or can't be written.
    """
    pid = os.getpid()
    folder = os.path.join(run, str(pid))
    number = 1
    while True:
        try:
            os.mkdir(folder)
            break
        except FileExistsError:
            number += 1
            folder = os.path.join(run, f"{pid}-{number}")
    body = {
        "format": FORMAT,
        "schema": SCHEMA,
        "pid": pid,
        "parent_pid": os.getppid(),
        "argv": sys.orig_argv,
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "state": "started",
    }
    checksum = zlib.crc32(_json(body).encode())
    scratch = os.path.join(folder, f".{MANIFEST}")
    with open(scratch, "w", encoding="utf-8") as file:
        file.write(_json({**body, "crc32": checksum}) + "\n")
    os.rename(scratch, os.path.join(folder, MANIFEST))
    return folder


def _json(value: object) -> str:
    """``json.dumps(value, sort_keys=True)`` for text, integers, and lists and mappings of them."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_json(k)}: {_json(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_json, value)) + "]"
    return encode_basestring_ascii(value) if isinstance(value, str) else str(value)
