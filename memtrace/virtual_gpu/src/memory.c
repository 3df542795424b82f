/* Device memory: a budget of bytes, and addresses that nothing ever touches.

   A device's addresses lie where Linux on x86-64 places nothing by itself, between the programs'
   own (from 0x55…) and the null page, so a program that follows one crashes instead of reading
   another's data. Each request gets the lowest gap that fits: the same program gets the same
   addresses in each run. */
#include "ranges.h"
#include "vgpu.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#define TIB (1ull << 40)
#define FIRST_ADDRESS (0x20ull << 40)

enum { POOL_UNIT = 512 }; /* what cudaMallocAsync rounds to */

typedef struct {
    uintptr_t first;
    Ranges blocks;
} Space;

typedef struct {
    Space plain, pooled;
    size_t taken; /* bytes of the budget */
    Pool pool;
} Memory;

static Memory memories[VGPU_MAX_DEVICES];
static Ranges host;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t round_up(size_t size, size_t unit)
{
    return (size + unit - 1) / unit * unit;
}

static bool place(Space *space, uintptr_t *address, size_t size)
{
    uintptr_t start = ranges_gap(&space->blocks, space->first, size, 1);
    if (start + size > space->first + TIB)
        return false;
    *address = start;
    return ranges_insert(&space->blocks, (Range){start, size, 0});
}

static Memory *memory_of(int device)
{
    if (vgpu_device(device) == NULL)
        return NULL;
    Memory *memory = &memories[device];
    if (memory->plain.first == 0) {
        memory->plain.first = FIRST_ADDRESS + 2 * (uintptr_t)device * TIB;
        memory->pooled.first = memory->plain.first + TIB;
    }
    return memory;
}

static size_t left(int device)
{
    const Device *card = vgpu_device(device);
    return card->total - card->context - memories[device].taken;
}

bool vgpu_take(int device, size_t size)
{
    pthread_mutex_lock(&lock);
    bool fits = memory_of(device) != NULL && size <= left(device);
    if (fits)
        memories[device].taken += size;
    pthread_mutex_unlock(&lock);
    return fits;
}

void vgpu_give_back(int device, size_t size)
{
    pthread_mutex_lock(&lock);
    memories[device].taken -= size;
    pthread_mutex_unlock(&lock);
}

size_t vgpu_free_memory(int device)
{
    pthread_mutex_lock(&lock);
    size_t size = left(device);
    pthread_mutex_unlock(&lock);
    return size;
}

int vgpu_malloc(uintptr_t *address, size_t size, int device)
{
    *address = 0;
    if (size == 0)
        return OK;
    int error = OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    Memory *memory = memory_of(device);
    if (memory != NULL && size <= left(device)) {
        size = round_up(size, PAGE);
        if (size <= left(device) && place(&memory->plain, address, size)) {
            memory->taken += size;
            error = OK;
        }
    }
    pthread_mutex_unlock(&lock);
    return error;
}

/* The pool keeps what it once held until it is trimmed, as the driver's does; how it splits that
   is not modelled, so what it reserves is the least that it could. */
static bool pool_grow(int device, uint64_t used)
{
    Pool *pool = &memories[device].pool;
    uint64_t reserved = round_up(used, PAGE);
    if (reserved > pool->reserved) {
        if (reserved - pool->reserved > left(device) || reserved > vgpu_device(device)->pool)
            return false;
        memories[device].taken += reserved - pool->reserved;
        pool->reserved = reserved;
        if (reserved > pool->reserved_high)
            pool->reserved_high = reserved;
    }
    pool->used = used;
    if (used > pool->used_high)
        pool->used_high = used;
    return true;
}

int vgpu_pool_malloc(uintptr_t *address, size_t size, int device)
{
    *address = 0;
    if (size == 0)
        return OK;
    int error = OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    Memory *memory = memory_of(device);
    if (memory != NULL && size <= vgpu_device(device)->total) {
        size = round_up(size, POOL_UNIT);
        uint64_t used = memory->pool.used;
        if (pool_grow(device, used + size)) {
            if (place(&memory->pooled, address, size))
                error = OK;
            else
                memory->pool.used = used;
        }
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static void trim(int device, uint64_t keep)
{
    Pool *pool = &memories[device].pool;
    uint64_t least = round_up(pool->used, PAGE);
    uint64_t reserved = keep > least ? keep : least;
    if (reserved < pool->reserved) {
        memories[device].taken -= pool->reserved - reserved;
        pool->reserved = reserved;
    }
}

void vgpu_pool_trim(int device, uint64_t keep)
{
    pthread_mutex_lock(&lock);
    trim(device, keep);
    pthread_mutex_unlock(&lock);
}

/* Above its threshold a pool keeps nothing over a synchronisation. */
void vgpu_pools_synchronized(void)
{
    pthread_mutex_lock(&lock);
    for (int device = 0; device < vgpu_device_count(); device++)
        if (memories[device].pool.reserved > memories[device].pool.threshold)
            trim(device, memories[device].pool.threshold);
    pthread_mutex_unlock(&lock);
}

Pool *vgpu_pool(int device)
{
    return memory_of(device) == NULL ? NULL : &memories[device].pool;
}

/* Memory of either kind: cudaFree takes what cudaMallocAsync gave, and the other way round. */
int vgpu_free(uintptr_t address)
{
    if (address == 0)
        return OK;
    int error = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (int device = 0; device < vgpu_device_count() && error != OK; device++) {
        Memory *memory = memory_of(device);
        size_t size = ranges_take(&memory->plain.blocks, address);
        if (size) {
            memory->taken -= size;
            error = OK;
        } else if ((size = ranges_take(&memory->pooled.blocks, address)) != 0) {
            memory->pool.used -= size;
            error = OK;
        }
    }
    pthread_mutex_unlock(&lock);
    return error;
}

int vgpu_host_register(void *address, size_t size)
{
    if (address == NULL || size == 0)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    bool done = ranges_insert(&host, (Range){(uintptr_t)address, size, 0});
    pthread_mutex_unlock(&lock);
    return done ? OK : OUT_OF_MEMORY;
}

int vgpu_host_unregister(void *address)
{
    pthread_mutex_lock(&lock);
    size_t size = ranges_take(&host, (uintptr_t)address);
    pthread_mutex_unlock(&lock);
    return size ? OK : INVALID_VALUE;
}

/* Pinned memory is real host memory: programs read and write it. */
int vgpu_host_malloc(void **address, size_t size)
{
    *address = NULL;
    if (size == 0)
        return OK;
    void *made = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED)
        return OUT_OF_MEMORY;
    int error = vgpu_host_register(made, size);
    if (error)
        munmap(made, size);
    else
        *address = made;
    return error;
}

int vgpu_host_free(void *address)
{
    if (address == NULL)
        return OK;
    pthread_mutex_lock(&lock);
    size_t size = ranges_take(&host, (uintptr_t)address);
    pthread_mutex_unlock(&lock);
    if (size == 0)
        return INVALID_VALUE;
    munmap(address, size);
    return OK;
}

Pointer vgpu_pointer(uintptr_t address)
{
    Pointer found = vgpu_mapped(address);
    if (found.kind != UNKNOWN_MEMORY)
        return found;
    pthread_mutex_lock(&lock);
    const Range *block = ranges_around(&host, address);
    if (block != NULL) {
        found = (Pointer){HOST_MEMORY, 0, block->start, block->size};
    } else {
        for (int device = 0; device < vgpu_device_count() && block == NULL; device++) {
            Memory *memory = memory_of(device);
            block = ranges_around(&memory->plain.blocks, address);
            if (block == NULL)
                block = ranges_around(&memory->pooled.blocks, address);
            if (block != NULL)
                found = (Pointer){DEVICE_MEMORY, device, block->start, block->size};
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static void (*told)(size_t size);
static _Atomic uint64_t to_device, to_host;

void vgpu_moved(uint64_t moved[2])
{
    moved[0] = to_device;
    moved[1] = to_host;
}

void vgpu_tell_reads(void (*tell)(size_t size))
{
    told = tell;
}

/* Rows of `width` bytes, `pitch` bytes apart. What a device holds is not known: the host reads
   zeros. */
void vgpu_copy(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
               size_t height)
{
    bool read = vgpu_pointer((uintptr_t)from).kind == DEVICE_MEMORY;
    if (vgpu_pointer((uintptr_t)to).kind == DEVICE_MEMORY) {
        if (!read)
            to_device += width * height;
        return;
    }
    if (width * height == 0)
        return;
    for (size_t row = 0; row < height; row++) {
        char *target = (char *)to + row * to_pitch;
        if (read)
            memset(target, 0, width);
        else
            memmove(target, (const char *)from + row * from_pitch, width);
    }
    if (!read)
        return;
    to_host += width * height;
    if (told != NULL)
        told(width * height);
}
