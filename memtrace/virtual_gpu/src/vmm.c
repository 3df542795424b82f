/* The driver's virtual memory management, on which expandable segments stand: physical memory comes
   from a device's budget, addresses from one reserve, and a mapping ties the two. */
#include "ranges.h"
#include "vgpu.h"

#include <pthread.h>

#define FIRST_ADDRESS (0x48ull << 40) /* above the devices' own, see memory.c */
#define LAST_ADDRESS (0x50ull << 40)

typedef struct {
    size_t size;
    int device;
    int references; /* its handle and its mappings; 0: the entry is free */
    bool released;
} Physical;

static Physical *physicals;
static size_t physical_count, physical_capacity;
static Ranges reserved, mapped;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The live entry of a handle, which is its index + 1; NULL if there is none. */
static Physical *physical_of(uint64_t handle)
{
    if (handle == 0 || handle > physical_count)
        return NULL;
    Physical *physical = &physicals[handle - 1];
    return physical->references > 0 ? physical : NULL;
}

static void drop(Physical *physical)
{
    if (--physical->references == 0)
        vgpu_give_back(physical->device, physical->size);
}

int vgpu_physical_create(uint64_t *handle, size_t size, int device)
{
    if (size == 0 || size % PAGE != 0)
        return INVALID_VALUE;
    if (vgpu_device(device) == NULL)
        return INVALID_DEVICE;
    if (!vgpu_take(device, size))
        return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    size_t index = 0;
    while (index < physical_count && physicals[index].references > 0)
        index++;
    bool room = index < physical_capacity;
    if (!room) {
        size_t capacity = physical_capacity ? 2 * physical_capacity : 256;
        Physical *larger = realloc(physicals, capacity * sizeof *larger);
        if ((room = larger != NULL)) {
            physicals = larger;
            physical_capacity = capacity;
        }
    }
    if (room) {
        physicals[index] = (Physical){size, device, 1, false};
        if (index == physical_count)
            physical_count++;
        *handle = index + 1;
    }
    pthread_mutex_unlock(&lock);
    if (!room)
        vgpu_give_back(device, size);
    return room ? OK : OUT_OF_MEMORY;
}

int vgpu_physical_release(uint64_t handle)
{
    pthread_mutex_lock(&lock);
    Physical *physical = physical_of(handle);
    bool valid = physical != NULL && !physical->released;
    if (valid) {
        physical->released = true;
        drop(physical);
    }
    pthread_mutex_unlock(&lock);
    return valid ? OK : INVALID_VALUE;
}

int vgpu_reserve(uintptr_t *address, size_t size, size_t alignment)
{
    if (size == 0 || size % PAGE != 0)
        return INVALID_VALUE;
    size_t unit = alignment > PAGE ? alignment : PAGE;
    pthread_mutex_lock(&lock);
    uintptr_t start = ranges_gap(&reserved, FIRST_ADDRESS, size, unit);
    bool room = start + size <= LAST_ADDRESS && ranges_insert(&reserved, (Range){start, size, 0});
    pthread_mutex_unlock(&lock);
    if (!room)
        return OUT_OF_MEMORY;
    *address = start;
    return OK;
}

int vgpu_unreserve(uintptr_t address, size_t size)
{
    pthread_mutex_lock(&lock);
    const Range *range = ranges_around(&reserved, address);
    bool valid = range != NULL && range->start == address && range->size == size;
    if (valid)
        ranges_take(&reserved, address);
    pthread_mutex_unlock(&lock);
    return valid ? OK : INVALID_VALUE;
}

int vgpu_map(uintptr_t address, size_t size, uint64_t handle)
{
    pthread_mutex_lock(&lock);
    Physical *physical = physical_of(handle);
    const Range *range = ranges_around(&reserved, address);
    size_t next = ranges_after(&mapped, address);
    bool valid = physical != NULL && physical->size == size && range != NULL &&
                 address + size <= range->start + range->size &&
                 ranges_around(&mapped, address) == NULL &&
                 (next == mapped.count || mapped.ranges[next].start >= address + size);
    if (valid && (valid = ranges_insert(&mapped, (Range){address, size, handle})))
        physical->references++;
    pthread_mutex_unlock(&lock);
    return valid ? OK : INVALID_VALUE;
}

/* Of whole mappings, one or several side by side. */
int vgpu_unmap(uintptr_t address, size_t size)
{
    pthread_mutex_lock(&lock);
    size_t first = ranges_after(&mapped, address), index = first ? first - 1 : 0;
    uintptr_t at = address;
    while (first && index < mapped.count && mapped.ranges[index].start == at &&
           at + mapped.ranges[index].size <= address + size)
        at += mapped.ranges[index++].size;
    bool valid = size > 0 && at == address + size;
    if (valid)
        while (index-- > first - 1) {
            drop(&physicals[mapped.ranges[index].handle - 1]);
            ranges_remove(&mapped, index);
        }
    pthread_mutex_unlock(&lock);
    return valid ? OK : INVALID_VALUE;
}

int vgpu_handle_at(uintptr_t address, uint64_t *handle)
{
    pthread_mutex_lock(&lock);
    const Range *range = ranges_around(&mapped, address);
    if (range != NULL)
        *handle = range->handle;
    pthread_mutex_unlock(&lock);
    return range != NULL ? OK : INVALID_VALUE;
}

Pointer vgpu_mapped(uintptr_t address)
{
    Pointer found = {UNKNOWN_MEMORY, 0, 0, 0};
    if (address < FIRST_ADDRESS || address >= LAST_ADDRESS)
        return found;
    pthread_mutex_lock(&lock);
    const Range *range = ranges_around(&mapped, address);
    if (range != NULL)
        found = (Pointer){DEVICE_MEMORY, physicals[range->handle - 1].device, range->start,
                          range->size};
    pthread_mutex_unlock(&lock);
    return found;
}
