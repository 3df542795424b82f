"""What a process on virtual GPUs has copied between host and devices."""

import ctypes
from typing import NamedTuple


class Moved(NamedTuple):
    """Bytes."""

    to_device: int
    to_host: int


def moved() -> Moved:
    """Since the process began.

    Raises:
        OSError, AttributeError: this process has no virtual GPU.
    """
    counted = (ctypes.c_uint64 * 2)()
    ctypes.CDLL("libcuda.so.1").vgpu_moved(counted)
    return Moved(*counted)
