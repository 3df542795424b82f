/* The devices: read once from MEMTRACE_VIRTUAL_GPU, which the launcher writes.

   The variable holds the number of the CUDA driver, a '|' and the version of PyTorch, then one
   entry for each device after a ';'; its fields stand in the order of read_device(). */
#define _GNU_SOURCE
#include "vgpu.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static Device devices[VGPU_MAX_DEVICES];
static int order[VGPU_MAX_DEVICES]; /* which of the devices are visible */
static int known, count; /* of all devices, of the visible ones */
static int driver_version;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static __thread int current;

static bool read_device(char *entry, Device *device)
{
    char *fields[15];
    int n = 0;
    for (char *field; n < 15 && (field = strsep(&entry, "|")) != NULL; n++)
        fields[n] = field;
    if (n != 14)
        return false;
    snprintf(device->name, sizeof device->name, "%s", fields[0]);
    device->total = strtoull(fields[1], NULL, 10);
    device->context = strtoull(fields[2], NULL, 10);
    device->major = atoi(fields[3]);
    device->minor = atoi(fields[4]);
    device->code = atoi(fields[5]);
    device->processors = atoi(fields[6]);
    device->l2_cache = atoi(fields[7]);
    device->shared_per_block = atoi(fields[8]);
    device->shared_per_processor = atoi(fields[9]);
    device->threads_per_processor = atoi(fields[10]);
    device->blocks_per_processor = atoi(fields[11]);
    device->integrated = atoi(fields[12]);
    device->pool = strtoull(fields[13], NULL, 10);
    return true;
}

/* CUDA_VISIBLE_DEVICES as CUDA reads it, numbers only: the list ends at the first bad entry. */
static void choose_visible(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible == NULL) {
        for (count = 0; count < known; count++)
            order[count] = count;
        return;
    }
    while (count < known) {
        char *end;
        long ordinal = strtol(visible, &end, 10);
        if (end == visible || ordinal < 0 || ordinal >= known)
            return;
        order[count++] = (int)ordinal;
        if (*end != ',')
            return;
        visible = end + 1;
    }
}

static void read_devices(void)
{
    const char *variable = getenv("MEMTRACE_VIRTUAL_GPU");
    if (variable == NULL)
        return;
    char *text = strdup(variable), *rest = text;
    const char *version = strsep(&rest, ";");
    driver_version = atoi(version);
    for (char *entry; known < VGPU_MAX_DEVICES && (entry = strsep(&rest, ";")) != NULL;)
        if (read_device(entry, &devices[known]))
            known++;
    free(text);
    choose_visible();
}

int vgpu_device_count(void)
{
    pthread_once(&once, read_devices);
    return count;
}

const Device *vgpu_device(int ordinal)
{
    return ordinal >= 0 && ordinal < vgpu_device_count() ? &devices[order[ordinal]] : NULL;
}

int vgpu_current_device(void)
{
    return current;
}

int vgpu_set_current_device(int ordinal)
{
    if (vgpu_device(ordinal) == NULL)
        return INVALID_DEVICE;
    current = ordinal;
    return OK;
}

int vgpu_driver_version(void)
{
    pthread_once(&once, read_devices);
    return driver_version;
}

int vgpu_index(int ordinal)
{
    return order[ordinal];
}

const Device *vgpu_device_at(int index)
{
    pthread_once(&once, read_devices);
    return index >= 0 && index < known ? &devices[index] : NULL;
}

int vgpu_ordinal(int index)
{
    for (int ordinal = 0; ordinal < vgpu_device_count(); ordinal++)
        if (order[ordinal] == index)
            return ordinal;
    return -1;
}

int vgpu_pci_bus(int index)
{
    return index + 1;
}

void vgpu_uuid(int index, unsigned char uuid[16])
{
    memcpy(uuid, "memtrace-virtua\0", 16);
    uuid[15] = (unsigned char)index;
}

int vgpu_attribute(int *value, int attribute, int ordinal)
{
    const Device *device = vgpu_device(ordinal);
    if (device == NULL)
        return INVALID_DEVICE;
    if (value == NULL)
        return INVALID_VALUE;
    switch (attribute) {
    case 1: *value = 1024; break;            /* threads per block */
    case 2: case 3: *value = 1024; break;    /* block, x and y */
    case 4: *value = 64; break;              /* block, z */
    case 5: *value = 2147483647; break;      /* grid, x */
    case 6: case 7: *value = 65535; break;   /* grid, y and z */
    case 8: *value = STATIC_SHARED_MEMORY; break;
    case 9: *value = 65536; break;           /* constant memory */
    case 10: *value = 32; break;             /* warp */
    case 11: *value = 2147483647; break;     /* pitch */
    case 12: *value = 65536; break;          /* registers per block */
    case 13: case 36: *value = 1000000; break; /* clocks in kHz: nothing runs */
    case 14: *value = 512; break;            /* texture alignment */
    case 15: *value = 1; break;
    case 16: *value = device->processors; break;
    case 18: *value = device->integrated; break;
    case 19: case 31: case 41: case 78: *value = 1; break;
    case 33: *value = vgpu_pci_bus(vgpu_index(ordinal)); break;
    case 37: *value = 256; break;            /* bus width */
    case 38: *value = device->l2_cache; break;
    case 39: *value = device->threads_per_processor; break;
    case 40: *value = 2; break;              /* copy engines */
    case 75: *value = device->major; break;
    case 76: *value = device->minor; break;
    case 81: *value = device->shared_per_processor; break;
    case 82: *value = 65536; break;          /* registers per multiprocessor */
    case 87: *value = 64; break;             /* single to double precision */
    case 95: *value = 1; break;              /* cooperative launch */
    case 97: *value = device->shared_per_block; break;
    case 99: *value = 1; break;              /* host register */
    case 102: *value = 1; break;             /* virtual memory management */
    case 106: *value = device->blocks_per_processor; break;
    case 111: *value = 1024; break;          /* shared memory reserved per block */
    case 115: *value = 1; break;             /* memory pools */
    case 120: *value = device->major >= 9; break; /* cluster launch */
    default: *value = 0;
    }
    return OK;
}
