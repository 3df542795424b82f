/* The CUDA driver: what PyTorch, NVRTC's users and the runtime's clients call of it. */
#define _GNU_SOURCE
#include "vgpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* cuda.h names a newer variant of a function by a macro; both names get the same code. */
#define ALSO(name, of) extern __typeof__(of) name __attribute__((alias(#of), visibility("default")))

static int a_context, a_module;

EXPORT int cuInit(unsigned flags)
{
    (void)flags;
    return vgpu_device_count() ? OK : NO_DEVICE;
}

EXPORT int cuDriverGetVersion(int *version)
{
    *version = vgpu_driver_version();
    return OK;
}

EXPORT int cuDeviceGetCount(int *count)
{
    *count = vgpu_device_count();
    return OK;
}

EXPORT int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return vgpu_device(ordinal) == NULL ? INVALID_DEVICE : OK;
}

EXPORT int cuDeviceGetName(char *name, int length, int device)
{
    if (vgpu_device(device) == NULL)
        return INVALID_DEVICE;
    snprintf(name, (size_t)length, "%s", vgpu_device(device)->name);
    return OK;
}

EXPORT int cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
    if (vgpu_device(device) == NULL)
        return INVALID_DEVICE;
    vgpu_uuid(vgpu_index(device), uuid);
    return OK;
}
ALSO(cuDeviceGetUuid, cuDeviceGetUuid_v2);

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    if (vgpu_device(device) == NULL)
        return INVALID_DEVICE;
    *bytes = vgpu_device(device)->total;
    return OK;
}
ALSO(cuDeviceTotalMem, cuDeviceTotalMem_v2);

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    return vgpu_attribute(value, attribute, device);
}

EXPORT int cuDeviceCanAccessPeer(int *can, int device, int peer)
{
    (void)device, (void)peer;
    *can = 0;
    return OK;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = &a_context;
    return vgpu_device(device) == NULL ? INVALID_DEVICE : OK;
}

EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    *flags = 0;
    *active = 1;
    return vgpu_device(device) == NULL ? INVALID_DEVICE : OK;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device)
{
    return vgpu_device(device) == NULL ? INVALID_DEVICE : OK;
}
ALSO(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2);

EXPORT int cuCtxGetCurrent(void **context)
{
    *context = &a_context;
    return OK;
}

EXPORT int cuCtxSetCurrent(void *context)
{
    (void)context;
    return OK;
}

EXPORT int cuCtxPushCurrent_v2(void *context)
{
    (void)context;
    return OK;
}
ALSO(cuCtxPushCurrent, cuCtxPushCurrent_v2);

EXPORT int cuCtxPopCurrent_v2(void **context)
{
    if (context != NULL)
        *context = &a_context;
    return OK;
}
ALSO(cuCtxPopCurrent, cuCtxPopCurrent_v2);

EXPORT int cuCtxGetDevice(int *device)
{
    *device = vgpu_current_device();
    return OK;
}

EXPORT int cuCtxSynchronize(void)
{
    return vgpu_device_synchronize();
}

EXPORT int cuGetErrorString(int error, const char **text)
{
    *text = vgpu_error_text(error);
    return OK;
}

EXPORT int cuGetErrorName(int error, const char **name)
{
    *name = vgpu_error_name(error);
    return OK;
}

EXPORT int cuGetExportTable(const void **table, const void *id)
{
    (void)id;
    *table = NULL;
    return NOT_SUPPORTED;
}

/* Status 1 of the query says that the driver has no such function. */
EXPORT int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                               int *status)
{
    (void)version, (void)flags;
    *function = dlsym(RTLD_DEFAULT, symbol);
    if (status != NULL)
        *status = *function == NULL;
    return *function == NULL ? NOT_FOUND : OK;
}

EXPORT int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

EXPORT int cuMemGetInfo_v2(size_t *free, size_t *total)
{
    const Device *device = vgpu_device(vgpu_current_device());
    if (device == NULL)
        return NO_DEVICE;
    *free = vgpu_free_memory(vgpu_current_device());
    *total = device->total;
    return OK;
}
ALSO(cuMemGetInfo, cuMemGetInfo_v2);

EXPORT int cuMemAlloc_v2(uintptr_t *address, size_t size)
{
    return vgpu_malloc(address, size, vgpu_current_device());
}
ALSO(cuMemAlloc, cuMemAlloc_v2);

EXPORT int cuMemFree_v2(uintptr_t address)
{
    vgpu_device_synchronize();
    return vgpu_free(address);
}
ALSO(cuMemFree, cuMemFree_v2);

EXPORT int cuMemGetAddressRange_v2(uintptr_t *start, size_t *size, uintptr_t address)
{
    Pointer found = vgpu_pointer(address);
    if (found.kind == UNKNOWN_MEMORY)
        return INVALID_VALUE;
    if (start != NULL)
        *start = found.start;
    if (size != NULL)
        *size = found.size;
    return OK;
}
ALSO(cuMemGetAddressRange, cuMemGetAddressRange_v2);

/* Attributes by number: 1 the context, 2 the kind of memory (1 host, 2 device), 3 and 4 the address
   as the device and the host see it, 9 the device. */
EXPORT int cuPointerGetAttribute(void *value, int attribute, uintptr_t address)
{
    Pointer found = vgpu_pointer(address);
    if (found.kind == UNKNOWN_MEMORY)
        return INVALID_VALUE;
    void *context = &a_context;
    switch (attribute) {
    case 1: memcpy(value, &context, sizeof context); return OK;
    case 2: memcpy(value, &found.kind, sizeof(int)); return OK;
    case 3: case 4: memcpy(value, &address, sizeof address); return OK;
    case 9: memcpy(value, &found.device, sizeof(int)); return OK;
    default: return NOT_SUPPORTED;
    }
}

EXPORT int cuMemsetD32Async(uintptr_t address, unsigned value, size_t count, Stream *stream)
{
    (void)address, (void)value, (void)count;
    return vgpu_submit(stream);
}

EXPORT int cuStreamWriteValue32(Stream *stream, uintptr_t address, unsigned value, unsigned flags)
{
    (void)address, (void)value, (void)flags;
    return vgpu_submit(stream);
}
ALSO(cuStreamWriteValue32_v2, cuStreamWriteValue32);

EXPORT int cuStreamSynchronize(Stream *stream)
{
    return vgpu_stream_synchronize(stream);
}

typedef struct {
    int type, handle_types;
    struct {
        int type, id;
    } location;
    /* and what nothing here reads */
} AllocationProperties;

EXPORT int cuMemCreate(uint64_t *handle, size_t size, const AllocationProperties *properties,
                       unsigned long long flags)
{
    (void)flags;
    return vgpu_physical_create(handle, size, properties->location.id);
}

EXPORT int cuMemRelease(uint64_t handle)
{
    return vgpu_physical_release(handle);
}

EXPORT int cuMemAddressReserve(uintptr_t *address, size_t size, size_t alignment, uintptr_t wish,
                               unsigned long long flags)
{
    (void)wish, (void)flags;
    return vgpu_reserve(address, size, alignment);
}

EXPORT int cuMemAddressFree(uintptr_t address, size_t size)
{
    return vgpu_unreserve(address, size);
}

EXPORT int cuMemMap(uintptr_t address, size_t size, size_t offset, uint64_t handle,
                    unsigned long long flags)
{
    (void)flags;
    return offset ? INVALID_VALUE : vgpu_map(address, size, handle);
}

EXPORT int cuMemUnmap(uintptr_t address, size_t size)
{
    return vgpu_unmap(address, size);
}

EXPORT int cuMemSetAccess(uintptr_t address, size_t size, const void *access, size_t count)
{
    (void)size, (void)access, (void)count;
    return vgpu_pointer(address).kind == DEVICE_MEMORY ? OK : INVALID_VALUE;
}

EXPORT int cuMemGetAllocationGranularity(size_t *granularity, const void *properties, int option)
{
    (void)properties, (void)option;
    *granularity = 2 << 20;
    return OK;
}

EXPORT int cuMemRetainAllocationHandle(uint64_t *handle, void *address)
{
    (void)handle, (void)address;
    return NOT_SUPPORTED;
}

EXPORT int cuMemExportToShareableHandle(void *shared, uint64_t handle, int type,
                                        unsigned long long flags)
{
    (void)shared, (void)handle, (void)type, (void)flags;
    vgpu_say_once("the virtual GPU can't share its memory or events between processes");
    return NOT_SUPPORTED;
}

EXPORT int cuModuleLoadData(void **module, const void *image)
{
    (void)image;
    *module = &a_module;
    return OK;
}

EXPORT int cuModuleLoadDataEx(void **module, const void *image, ...)
{
    return cuModuleLoadData(module, image);
}

EXPORT int cuModuleGetFunction(void **function, void *module, const char *name)
{
    (void)module, (void)name;
    *function = &a_module;
    return OK;
}

EXPORT int cuModuleUnload(void *module)
{
    (void)module;
    return OK;
}

EXPORT int cuFuncSetAttribute(void *function, int attribute, int value)
{
    (void)function, (void)attribute, (void)value;
    return OK;
}

EXPORT int cuFuncGetAttribute(int *value, int attribute, void *function)
{
    (void)function;
    *value = attribute == 0 ? 1024 : 0; /* 0: threads per block */
    return OK;
}

EXPORT int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                          Stream *stream, void **arguments, void **extra)
{
    (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared, (void)arguments, (void)extra;
    return function == NULL ? INVALID_HANDLE : vgpu_submit(stream);
}

EXPORT int cuLaunchCooperativeKernel(void *function, unsigned grid_x, unsigned grid_y,
                                     unsigned grid_z, unsigned block_x, unsigned block_y,
                                     unsigned block_z, unsigned shared, Stream *stream,
                                     void **arguments)
{
    return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared,
                          stream, arguments, NULL);
}

EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads,
                                                       size_t shared)
{
    (void)function, (void)shared;
    const Device *device = vgpu_device(vgpu_current_device());
    if (device == NULL || threads <= 0)
        return INVALID_VALUE;
    *blocks = device->threads_per_processor / threads;
    return OK;
}

EXPORT int cuTensorMapEncodeTiled(void *map, ...)
{
    (void)map;
    return OK;
}
