/* The CUDA runtime: devices, their properties, errors, and the driver's functions by name. */
#define _GNU_SOURCE
#include "runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static __thread int last_error;

int runtime_result(int error)
{
    if (error != OK)
        last_error = error;
    return error;
}

EXPORT int cudaGetLastError(void)
{
    int error = last_error;
    last_error = OK;
    return error;
}

EXPORT int cudaPeekAtLastError(void)
{
    return last_error;
}

EXPORT const char *cudaGetErrorName(int error)
{
    return vgpu_error_name(error);
}

EXPORT const char *cudaGetErrorString(int error)
{
    return vgpu_error_text(error);
}

EXPORT int cudaRuntimeGetVersion(int *version)
{
    *version = CUDA_VERSION;
    return OK;
}

EXPORT int cudaDriverGetVersion(int *version)
{
    *version = vgpu_driver_version();
    return OK;
}

EXPORT int cudaGetDeviceCount(int *count)
{
    *count = vgpu_device_count();
    return runtime_result(*count ? OK : NO_DEVICE);
}

EXPORT int cudaGetDevice(int *device)
{
    *device = vgpu_current_device();
    return OK;
}

EXPORT int cudaSetDevice(int device)
{
    return runtime_result(vgpu_set_current_device(device));
}

EXPORT int cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    return runtime_result(vgpu_attribute(value, attribute, device));
}

EXPORT int cudaDeviceGetPCIBusId(char *text, int length, int device)
{
    if (vgpu_device(device) == NULL)
        return runtime_result(INVALID_DEVICE);
    snprintf(text, (size_t)length, "0000:%02X:00.0", vgpu_pci_bus(vgpu_index(device)));
    return OK;
}

EXPORT int cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return OK;
}

EXPORT int cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    (void)device, (void)peer;
    *can = 0;
    return OK;
}

EXPORT int cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    (void)peer, (void)flags;
    return runtime_result(NOT_SUPPORTED);
}

EXPORT int cudaDeviceGetLimit(size_t *value, int limit)
{
    (void)limit;
    *value = 0;
    return OK;
}

/* cudaDeviceProp. CUDA 13 took eight fields out and put others at the end, so that the places of
   all but the first differ. */
#if CUDA_VERSION >= 13000
#define IN_12(declaration)
#else
#define IN_12(declaration) declaration;
#endif

typedef struct {
    char name[256];
    unsigned char uuid[16];
    char luid[8];
    unsigned luid_mask;
    size_t total, shared_per_block;
    int registers_per_block, warp;
    size_t pitch;
    int threads_per_block, block[3], grid[3];
    IN_12(int clock)
    size_t constant;
    int major, minor;
    size_t texture_alignment, texture_pitch;
    IN_12(int overlap)
    int processors;
    IN_12(int timeout)
    int integrated, map_host;
    IN_12(int compute_mode)
    int texture_1d, texture_1d_mipmap;
    IN_12(int texture_1d_linear)
    int textures[24], surfaces[12];
    size_t surface_alignment;
    int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, copy_engines, unified;
    IN_12(int memory_clock)
    int bus_width, l2_cache, persisting_l2, threads_per_processor, stream_priorities;
    int global_l1, local_l1;
    size_t shared_per_processor;
    int registers_per_processor, managed, multi_board, board_group, host_atomics;
    IN_12(int double_ratio)
    int pageable, concurrent_managed, preemption, host_pointer, cooperative;
    IN_12(int cooperative_multi)
    size_t shared_per_block_optin;
    int host_page_tables, direct_managed, blocks_per_processor, access_window;
    size_t reserved_shared_per_block;
    int host_register, sparse_arrays, host_register_read_only, timeline_semaphores, pools;
    int rdma;
    unsigned rdma_flush;
    int rdma_order;
    unsigned pool_handles;
    int deferred_arrays, ipc_events, clusters, unified_functions;
    int reserved[63];
} Properties;

/* sizeof(cudaDeviceProp) in the headers of CUDA 12.0 to 12.9 and of 13.0. */
_Static_assert(sizeof(Properties) == (CUDA_VERSION >= 13000 ? 1008 : 1032), "cudaDeviceProp");

static int properties(Properties *to, int ordinal)
{
    const Device *device = vgpu_device(ordinal);
    if (device == NULL)
        return INVALID_DEVICE;
    memset(to, 0, sizeof *to);
    snprintf(to->name, sizeof to->name, "%s", device->name);
    vgpu_uuid(vgpu_index(ordinal), to->uuid);
    to->total = device->total;
    to->shared_per_block = STATIC_SHARED_MEMORY;
    to->registers_per_block = to->registers_per_processor = 65536;
    to->warp = 32;
    to->pitch = 2147483647;
    to->threads_per_block = to->block[0] = to->block[1] = 1024;
    to->block[2] = 64;
    to->grid[0] = 2147483647;
    to->grid[1] = to->grid[2] = 65535;
    to->constant = 65536;
    to->major = device->major;
    to->minor = device->minor;
    to->texture_alignment = to->surface_alignment = 512;
    to->texture_pitch = 32;
    to->processors = device->processors;
    to->integrated = device->integrated;
    to->map_host = to->concurrent_kernels = to->unified = to->stream_priorities = 1;
    to->pci_bus = vgpu_pci_bus(vgpu_index(ordinal));
    to->copy_engines = 2;
    to->bus_width = 256;
    to->l2_cache = device->l2_cache;
    to->threads_per_processor = device->threads_per_processor;
    to->global_l1 = to->local_l1 = to->cooperative = to->host_register = to->pools = 1;
    to->shared_per_processor = (size_t)device->shared_per_processor;
    to->shared_per_block_optin = (size_t)device->shared_per_block;
    to->blocks_per_processor = device->blocks_per_processor;
    to->reserved_shared_per_block = 1024;
    to->clusters = device->major >= 9;
    return OK;
}

#if CUDA_VERSION >= 13000
EXPORT int cudaGetDeviceProperties(Properties *to, int device)
#else
EXPORT int cudaGetDeviceProperties_v2(Properties *to, int device)
#endif
{
    return runtime_result(properties(to, device));
}

/* Status 1 of the query says that the driver has no such function. */
static int entry_point(const char *symbol, void **function, int *status)
{
    *function = dlsym(RTLD_DEFAULT, symbol);
    if (status != NULL)
        *status = *function == NULL;
    return OK;
}

EXPORT int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                   int *status)
{
    (void)flags;
    return entry_point(symbol, function, status);
}

EXPORT int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                            unsigned long long flags, int *status)
{
    (void)version, (void)flags;
    return entry_point(symbol, function, status);
}

EXPORT int cudaProfilerStart(void)
{
    return OK;
}

EXPORT int cudaProfilerStop(void)
{
    return OK;
}
