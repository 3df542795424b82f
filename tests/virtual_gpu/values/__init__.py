"""Tests that run within a process on a virtual GPU, started by ``test_values.py``.

pytest doesn't collect them by itself: their names don't begin with ``test_``.
"""

import torch

from memtrace.virtual_gpu import values
from memtrace.virtual_gpu.child import enter

enter(torch)


def unread() -> int:
    """Reads of unknown values so far."""
    count: int = values.summary()["unknown_reads"]
    return count
