"""Calls the runtime and the driver as no program should, and prints, as JSON, what they answer."""

import ctypes
import json

loaded = ctypes.CDLL(None)  # what is preloaded is found like this
OK, INVALID = 0, 1
MIB = 2**20


def address() -> "ctypes.c_uint64":
    return ctypes.c_uint64()


def used() -> int:
    free, total = address(), address()
    loaded.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return total.value - free.value


def free(value: int) -> int:
    return int(loaded.cudaFree(ctypes.c_void_p(value)))


answers = {}
pointer = address()
answers["malloc"] = loaded.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(5))
answers["inside"] = free(pointer.value + 512)
answers["first"] = free(pointer.value)
answers["second"] = free(pointer.value)
answers["host address"] = free(ctypes.addressof(pointer))
answers["null"] = free(0)
answers["too much"] = loaded.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(2**60))
answers["no device"] = loaded.cudaSetDevice(99)

room, handle = address(), address()
properties = (ctypes.c_uint32 * 8)(1, 0, 1, 0)
size = ctypes.c_size_t(4 * MIB)
loaded.cuMemAddressReserve(
    ctypes.byref(room), ctypes.c_size_t(64 * MIB), ctypes.c_size_t(0), None, 0
)
answers["create"] = loaded.cuMemCreate(ctypes.byref(handle), size, properties, 0)
answers["map"] = loaded.cuMemMap(room, size, ctypes.c_size_t(0), handle, 0)
answers["map twice"] = loaded.cuMemMap(room, size, ctypes.c_size_t(0), handle, 0)
outside = ctypes.c_uint64(room.value + 64 * MIB)
answers["map outside"] = loaded.cuMemMap(outside, size, ctypes.c_size_t(0), handle, 0)
half = ctypes.c_size_t(2 * MIB)
answers["unmap half"] = loaded.cuMemUnmap(room, half)
answers["release"] = loaded.cuMemRelease(handle)
answers["release twice"] = loaded.cuMemRelease(handle)
before = used()
answers["unmap"] = loaded.cuMemUnmap(room, size)
answers["given back"] = before - used()
answers["odd size"] = loaded.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(5), properties, 0)
print(json.dumps(answers))
