"""How a process introduces itself to the run that it belongs to.

Runs at the start of every recorded Python process, so it imports only what is there already or
costs nothing; see :mod:`memtrace.record.child`.
"""

import os
import sys
import zlib
from _json import encode_basestring_ascii  # the C function that json.dumps uses

from memtrace.trace import FORMAT, MANIFEST, SCHEMA

#: What launchers of several processes call a process's rank, the number of ranks and, if they say
#: it, its rank on this machine: torchrun (elastic), Open MPI, MPICH and Intel MPI, Slurm.
_RANKS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


def enter_run(run: str) -> str:
    """Make this process's folder in the run, with its first manifest.

    Returns:
        ``RUN/PID-START`` with the start time in clock ticks since the machine booted, so that a
        process id that is used again names another folder; ``-rank1`` follows where a launcher of
        several processes gave it a rank, and ``-2`` and so on for a program that replaced another
        one by exec.

    Raises:
        OSError: the run isn't there or can't be written.
    """
    pid = os.getpid()
    start_ticks = _start_ticks()
    ranks = _ranks()
    rank = f"-rank{ranks['rank']}" if ranks else ""
    base = folder = os.path.join(run, f"{pid}-{start_ticks}{rank}")
    number = 1
    while True:
        try:
            os.mkdir(folder)
            break
        except FileExistsError:
            number += 1
            folder = f"{base}-{number}"
    body = {
        "format": FORMAT,
        "schema": SCHEMA,
        "pid": pid,
        "start_ticks": start_ticks,
        **ranks,
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


def _start_ticks() -> int:
    """When this process started, in clock ticks since the machine booted."""
    with open("/proc/self/stat", "rb", buffering=0) as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def _ranks() -> "dict[str, int]":
    """``rank``, ``world_size`` and ``local_rank`` as the environment says; empty if it doesn't."""
    for names in _RANKS:
        rank, size, local = map(os.environ.get, names)
        if rank and size and rank.isdecimal() and size.isdecimal():
            found = {"rank": int(rank), "world_size": int(size)}
            return {**found, "local_rank": int(local)} if local and local.isdecimal() else found
    return {}


def _json(value: object) -> str:
    """``json.dumps(value, sort_keys=True)`` for text, integers, and lists and mappings of them."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_json(k)}: {_json(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_json, value)) + "]"
    return encode_basestring_ascii(value) if isinstance(value, str) else str(value)
