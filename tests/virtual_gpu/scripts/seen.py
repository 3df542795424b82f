"""Prints, as JSON, what the runtime and NVML say of the cards, and the addresses that it gives."""

import ctypes
import json

loaded = ctypes.CDLL(None)  # what is preloaded is found like this


def count(function: str) -> int:
    number = ctypes.c_int()
    getattr(loaded, function)(ctypes.byref(number))
    return number.value


def allocate(size: int) -> int:
    pointer = ctypes.c_void_p()
    assert loaded.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
    return pointer.value or 0


free, total = ctypes.c_size_t(), ctypes.c_size_t()
loaded.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
document = {
    "visible": count("cudaGetDeviceCount"),
    "all": count("nvmlDeviceGetCount_v2"),
    "total": total.value,
    "taken": total.value - free.value,
    "addresses": [allocate(size) for size in (1, 9**9, 5)],
}
print(json.dumps(document))
