/* The CUDA runtime: memory, pools and copies. */
#include "runtime.h"

#include <string.h>

EXPORT int cudaMalloc(void **address, size_t size)
{
    return runtime_result(vgpu_malloc((uintptr_t *)address, size, vgpu_current_device()));
}

/* It waits for the device, as the real one does. */
EXPORT int cudaFree(void *address)
{
    if (address != NULL)
        vgpu_device_synchronize();
    return runtime_result(vgpu_free((uintptr_t)address));
}

EXPORT int cudaMemGetInfo(size_t *free, size_t *total)
{
    int device = vgpu_current_device();
    if (vgpu_device(device) == NULL)
        return runtime_result(NO_DEVICE);
    *free = vgpu_free_memory(device);
    *total = vgpu_device(device)->total;
    return OK;
}

EXPORT int cudaMallocAsync(void **address, size_t size, Stream *stream)
{
    return runtime_result(vgpu_pool_malloc((uintptr_t *)address, size, vgpu_stream_device(stream)));
}

EXPORT int cudaFreeAsync(void *address, Stream *stream)
{
    (void)stream;
    return runtime_result(vgpu_free((uintptr_t)address));
}

EXPORT int cudaDeviceGetDefaultMemPool(Pool **pool, int device)
{
    *pool = vgpu_pool(device);
    return runtime_result(*pool == NULL ? INVALID_DEVICE : OK);
}

/* The attributes by number: 4 the threshold, 5 to 8 reserved, its peak, used, its peak. */
EXPORT int cudaMemPoolGetAttribute(Pool *pool, int attribute, void *value)
{
    const uint64_t values[] = {pool->threshold, pool->reserved, pool->reserved_high, pool->used,
                               pool->used_high};
    if (attribute >= 4 && attribute <= 8)
        memcpy(value, &values[attribute - 4], sizeof *values);
    else
        memset(value, 0, sizeof(int));
    return OK;
}

EXPORT int cudaMemPoolSetAttribute(Pool *pool, int attribute, void *value)
{
    if (attribute == 4)
        memcpy(&pool->threshold, value, sizeof pool->threshold);
    else if (attribute == 6)
        pool->reserved_high = pool->reserved;
    else if (attribute == 8)
        pool->used_high = pool->used;
    return OK;
}

EXPORT int cudaMemPoolTrimTo(Pool *pool, size_t keep)
{
    for (int device = 0; device < vgpu_device_count(); device++)
        if (vgpu_pool(device) == pool)
            vgpu_pool_trim(device, keep);
    return OK;
}

EXPORT int cudaMemPoolSetAccess(Pool *pool, const void *descriptors, size_t count)
{
    (void)pool, (void)descriptors, (void)count;
    return OK;
}

EXPORT int cudaDeviceGetGraphMemAttribute(int device, int attribute, void *value)
{
    (void)device, (void)attribute;
    memset(value, 0, sizeof(uint64_t));
    return OK;
}

EXPORT int cudaDeviceSetGraphMemAttribute(int device, int attribute, void *value)
{
    (void)device, (void)attribute, (void)value;
    return OK;
}

EXPORT int cudaHostAlloc(void **address, size_t size, unsigned flags)
{
    (void)flags;
    return runtime_result(vgpu_host_malloc(address, size));
}

EXPORT int cudaMallocHost(void **address, size_t size)
{
    return runtime_result(vgpu_host_malloc(address, size));
}

EXPORT int cudaFreeHost(void *address)
{
    return runtime_result(vgpu_host_free(address));
}

EXPORT int cudaHostRegister(void *address, size_t size, unsigned flags)
{
    (void)flags;
    return runtime_result(vgpu_host_register(address, size));
}

EXPORT int cudaHostUnregister(void *address)
{
    return runtime_result(vgpu_host_unregister(address));
}

EXPORT int cudaHostGetDevicePointer(void **device, void *address, unsigned flags)
{
    (void)flags;
    *device = address;
    return OK;
}

typedef struct {
    int type; /* as MemoryKind numbers them */
    int device;
    void *device_pointer, *host_pointer;
#if CUDA_VERSION >= 13000
    long reserved[8];
#endif
} Attributes;

EXPORT int cudaPointerGetAttributes(Attributes *attributes, const void *address)
{
    Pointer found = vgpu_pointer((uintptr_t)address);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = (int)found.kind;
    attributes->device = found.kind == UNKNOWN_MEMORY ? -2 : found.device;
    if (found.kind != UNKNOWN_MEMORY)
        attributes->device_pointer = (void *)address;
    if (found.kind != DEVICE_MEMORY)
        attributes->host_pointer = (void *)address;
    return OK;
}

EXPORT int cudaMemcpy(void *to, const void *from, size_t size, int kind)
{
    (void)kind;
    int error = vgpu_stream_synchronize(NULL);
    if (error == OK)
        vgpu_copy(to, size, from, size, size, 1);
    return runtime_result(error);
}

EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, Stream *stream)
{
    (void)kind;
    int error = vgpu_submit(stream);
    if (error == OK)
        vgpu_copy(to, size, from, size, size, 1);
    return runtime_result(error);
}

EXPORT int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                               size_t size, Stream *stream)
{
    (void)to, (void)to_device, (void)from, (void)from_device, (void)size;
    return runtime_result(vgpu_submit(stream));
}

EXPORT int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                             size_t width, size_t height, int kind, Stream *stream)
{
    (void)kind;
    int error = vgpu_submit(stream);
    if (error == OK)
        vgpu_copy(to, to_pitch, from, from_pitch, width, height);
    return runtime_result(error);
}

EXPORT int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset,
                              int kind)
{
    (void)symbol, (void)from, (void)size, (void)offset, (void)kind;
    return OK;
}

/* Variables of kernels have an address too; nothing reads there. */
EXPORT int cudaGetSymbolAddress(void **address, const void *symbol)
{
    (void)symbol;
    *address = (void *)(0x1full << 40);
    return OK;
}

EXPORT int cudaMemset(void *address, int value, size_t size)
{
    (void)address, (void)value, (void)size;
    return runtime_result(vgpu_submit(NULL));
}

EXPORT int cudaMemsetAsync(void *address, int value, size_t size, Stream *stream)
{
    (void)address, (void)value, (void)size;
    return runtime_result(vgpu_submit(stream));
}

static int no_sharing(void)
{
    vgpu_say_once("the virtual GPU can't share its memory or events between processes");
    return runtime_result(NOT_SUPPORTED);
}

EXPORT int cudaIpcGetMemHandle(void *handle, void *address)
{
    (void)handle, (void)address;
    return no_sharing();
}

EXPORT int cudaIpcOpenMemHandle(void **address, ...)
{
    (void)address;
    return no_sharing();
}

EXPORT int cudaIpcCloseMemHandle(void *address)
{
    (void)address;
    return no_sharing();
}

EXPORT int cudaIpcGetEventHandle(void *handle, Event *event)
{
    (void)handle, (void)event;
    return no_sharing();
}

EXPORT int cudaIpcOpenEventHandle(Event **event, ...)
{
    (void)event;
    return no_sharing();
}
