"""A program that reads no value of the device goes the same way whether values are followed or not.

Many prefills are such programs, and following costs more than all else that they do. So one that
may be started again is run first without, and the stand-ins tell of each copy from a device to the
host. A small one may be what the program decides by, a number of elements that an operator asks for
included: the process ends at once, to be started again with values followed. A large one is of what
isn't known in either case, since no storage of that size is followed, and is counted. (A view that
repeats a small storage until it is that large would be known; nobody decides by one.)
"""

import ctypes
import functools
import os
from typing import Any

from memtrace.virtual_gpu import READ_UNFOLLOWED
from memtrace.virtual_gpu.values_known import Known
from memtrace.virtual_gpu.values_mirrors import LIMIT_INTEGERS
from memtrace.virtual_gpu.values_rules import Kind, Rule

_COPY = Rule(Kind.COPY, "copy_", None)


def told(known: Known, size: int) -> None:
    """``size`` bytes are read: if they are many count it in ``known``, else end the process."""
    if size <= LIMIT_INTEGERS:
        os._exit(READ_UNFOLLOWED)
    known.read_unknown(_COPY)


#: What the stand-ins call, kept alive.
_told: Any = None


def watch(known: Known) -> None:
    """Have the stand-ins tell of each read."""
    global _told
    _told = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(functools.partial(told, known))
    ctypes.CDLL("libcuda.so.1").vgpu_tell_reads(_told)
