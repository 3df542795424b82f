/* NVML: the devices, their memory, and this process as the only one that uses them. */
#include "vgpu.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { NOT_OFFERED = 3, NO_ROOM = 7, MISSING = 6 };

/* A handle is the index + 1; NVML counts all devices, whichever the process sees. */
static int index_of(const void *handle)
{
    return (int)(intptr_t)handle - 1;
}

static int handle_of(int index, void **handle)
{
    if (vgpu_device_at(index) == NULL)
        return MISSING;
    *handle = (void *)(intptr_t)(index + 1);
    return OK;
}

static size_t total(const void *handle)
{
    return vgpu_device_at(index_of(handle))->total;
}

static size_t used(const void *handle)
{
    int ordinal = vgpu_ordinal(index_of(handle));
    return ordinal < 0 ? 0 : total(handle) - vgpu_free_memory(ordinal);
}

EXPORT int nvmlInit_v2(void)
{
    return OK;
}

EXPORT int nvmlInit(void)
{
    return OK;
}

EXPORT int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return OK;
}

EXPORT int nvmlShutdown(void)
{
    return OK;
}

EXPORT const char *nvmlErrorString(int error)
{
    return error == OK            ? "Success"
           : error == NOT_OFFERED ? "Not Supported"
           : error == NO_ROOM     ? "Insufficient Size"
           : error == MISSING     ? "Not Found"
                                  : "Unknown Error";
}

EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned length)
{
    snprintf(text, length, "memtrace virtual GPU");
    return OK;
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    *version = vgpu_driver_version();
    return OK;
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = 0;
    while (vgpu_device_at((int)*count) != NULL)
        ++*count;
    return OK;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    return handle_of((int)index, handle);
}

static void uuid_text(int index, char *text, size_t length)
{
    unsigned char bytes[16];
    vgpu_uuid(index, bytes);
    int at = snprintf(text, length, "GPU-");
    for (int i = 0; i < 16; i++)
        at += snprintf(text + at, length - (size_t)at,
                       i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", bytes[i]);
}

EXPORT int nvmlDeviceGetUUID(const void *handle, char *text, unsigned length)
{
    if (length < 41)
        return NO_ROOM;
    uuid_text(index_of(handle), text, length);
    return OK;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    for (int index = 0; vgpu_device_at(index) != NULL; index++) {
        char text[48];
        uuid_text(index, text, sizeof text);
        if (strcmp(text, uuid) == 0)
            return handle_of(index, handle);
    }
    return MISSING;
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle)
{
    unsigned domain, bus;
    if (sscanf(id, "%x:%x:", &domain, &bus) == 2)
        return handle_of((int)bus - vgpu_pci_bus(0), handle);
    return MISSING;
}

EXPORT int nvmlDeviceGetIndex(const void *handle, unsigned *index)
{
    *index = (unsigned)index_of(handle);
    return OK;
}

EXPORT int nvmlDeviceGetName(const void *handle, char *name, unsigned length)
{
    snprintf(name, length, "%s", vgpu_device_at(index_of(handle))->name);
    return OK;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(const void *handle, int *major, int *minor)
{
    *major = vgpu_device_at(index_of(handle))->major;
    *minor = vgpu_device_at(index_of(handle))->minor;
    return OK;
}

EXPORT int nvmlDeviceGetMemoryInfo(const void *handle, unsigned long long memory[3])
{
    memory[0] = total(handle);
    memory[2] = used(handle);
    memory[1] = memory[0] - memory[2];
    return OK;
}

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} Memory;

EXPORT int nvmlDeviceGetMemoryInfo_v2(const void *handle, Memory *memory)
{
    memory->total = total(handle);
    memory->reserved = 0;
    memory->used = used(handle);
    memory->free = memory->total - memory->used;
    return OK;
}

typedef struct {
    unsigned pid;
    unsigned long long used;
} Process;

typedef struct {
    Process process;
    unsigned instance, compute_instance;
} NewProcess;

static Process this_process(const void *handle)
{
    return (Process){(unsigned)getpid(), used(handle)};
}

EXPORT int nvmlDeviceGetComputeRunningProcesses(const void *handle, unsigned *count,
                                                Process *processes)
{
    bool room = *count >= 1 && processes != NULL;
    *count = 1;
    if (!room)
        return NO_ROOM;
    processes[0] = this_process(handle);
    return OK;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(const void *handle, unsigned *count,
                                                   NewProcess *processes)
{
    bool room = *count >= 1 && processes != NULL;
    *count = 1;
    if (!room)
        return NO_ROOM;
    processes[0] = (NewProcess){this_process(handle), ~0u, ~0u};
    return OK;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(const void *handle, unsigned *count,
                                                   NewProcess *processes)
{
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, processes);
}

EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(const void *handle, unsigned *count,
                                                    NewProcess *processes)
{
    (void)handle, (void)processes;
    *count = 0;
    return OK;
}

EXPORT int nvmlDeviceGetMigMode(const void *handle, unsigned *current, unsigned *pending)
{
    (void)handle, (void)current, (void)pending;
    return NOT_OFFERED;
}

EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(const void *handle, ...)
{
    (void)handle;
    return NOT_OFFERED;
}

EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(const void *handle, ...)
{
    (void)handle;
    return NOT_OFFERED;
}

EXPORT int nvmlDeviceGetP2PStatus(const void *handle, ...)
{
    (void)handle;
    return NOT_OFFERED;
}
