/* What the stand-in libraries share: the devices, their memory, streams and events.

   The state lives in the stand-in of the driver (libcuda.so.1); the stand-ins of the runtime and of
   NVML call it. Nothing here includes a CUDA header: the few types that cross the boundary are
   declared with the layout that CUDA documents. */
#ifndef VGPU_H
#define VGPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum { VGPU_MAX_DEVICES = 16, PAGE = 2 << 20, STATIC_SHARED_MEMORY = 48 << 10 };

/* Error codes; the driver and the runtime share their numbers. */
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
};

/* One card, as the catalogue describes it. Sizes in bytes. */
typedef struct {
    char name[256];
    size_t total;
    size_t context; /* taken by the CUDA context; 0 where unknown */
    int major, minor;
    int code; /* the architecture, such as 86, of the kernels that it runs */
    int processors;
    int l2_cache;
    int shared_per_block, shared_per_processor; /* the former when a kernel asks for it */
    int threads_per_processor, blocks_per_processor;
    bool integrated;
    size_t pool; /* the most that the pool of cudaMallocAsync can hold */
} Device;

#pragma GCC visibility push(default)

/* device.c */
int vgpu_device_count(void);
const Device *vgpu_device(int ordinal); /* NULL if there is none */
int vgpu_current_device(void);
int vgpu_set_current_device(int ordinal);
int vgpu_attribute(int *value, int attribute, int ordinal);
int vgpu_index(int ordinal); /* a visible device's place among all, as NVML counts them */
const Device *vgpu_device_at(int index);
int vgpu_ordinal(int index); /* -1 if this process doesn't see it */
void vgpu_uuid(int index, unsigned char uuid[16]);
int vgpu_pci_bus(int index);
int vgpu_driver_version(void);

/* errors.c */
const char *vgpu_error_name(int error);
const char *vgpu_error_text(int error);
void vgpu_say_once(const char *what); /* one line on stderr for each text */

/* memory.c */
typedef enum { UNKNOWN_MEMORY = 0, HOST_MEMORY = 1, DEVICE_MEMORY = 2 } MemoryKind;

typedef struct {
    MemoryKind kind;
    int device;
    uintptr_t start;
    size_t size;
} Pointer;

typedef struct {
    uint64_t used, used_high, reserved, reserved_high, threshold;
} Pool;

int vgpu_malloc(uintptr_t *address, size_t size, int device);
int vgpu_free(uintptr_t address);
int vgpu_pool_malloc(uintptr_t *address, size_t size, int device);
Pool *vgpu_pool(int device);
void vgpu_pool_trim(int device, uint64_t keep);
void vgpu_pools_synchronized(void);
size_t vgpu_free_memory(int device);
int vgpu_host_malloc(void **address, size_t size);
int vgpu_host_free(void *address);
int vgpu_host_register(void *address, size_t size);
int vgpu_host_unregister(void *address);
Pointer vgpu_pointer(uintptr_t address);
void vgpu_copy(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
               size_t height);
void vgpu_tell_reads(void (*tell)(size_t size)); /* of each copy from a device to the host */
void vgpu_moved(uint64_t moved[2]); /* bytes so far, to a device and to the host */

/* vmm.c */
int vgpu_physical_create(uint64_t *handle, size_t size, int device);
int vgpu_physical_release(uint64_t handle);
int vgpu_reserve(uintptr_t *address, size_t size, size_t alignment);
int vgpu_unreserve(uintptr_t address, size_t size);
int vgpu_map(uintptr_t address, size_t size, uint64_t handle);
int vgpu_unmap(uintptr_t address, size_t size);
int vgpu_handle_at(uintptr_t address, uint64_t *handle);
Pointer vgpu_mapped(uintptr_t address);
bool vgpu_take(int device, size_t size); /* in memory.c: of the device's budget */
void vgpu_give_back(int device, size_t size);

/* streams.c */
typedef struct Stream Stream;
typedef struct Event Event;
typedef struct Graph Graph;
typedef struct UserObject UserObject;

int vgpu_stream_create(Stream **stream, unsigned flags, int priority);
int vgpu_stream_destroy(Stream *stream);
int vgpu_stream_priority(Stream *stream, int *priority);
int vgpu_stream_device(Stream *stream);
int vgpu_submit(Stream *stream);
int vgpu_stream_query(Stream *stream);
int vgpu_stream_synchronize(Stream *stream);
int vgpu_device_synchronize(void);
int vgpu_event_create(Event **event, unsigned flags);
int vgpu_event_destroy(Event *event);
int vgpu_event_record(Event *event, Stream *stream);
int vgpu_event_query(Event *event);
int vgpu_event_synchronize(Event *event);
int vgpu_event_elapsed(float *milliseconds, Event *start, Event *end);
int vgpu_stream_wait(Stream *stream, Event *event);

int vgpu_capture_begin(Stream *stream, Graph *into, int mode);
int vgpu_capture_end(Stream *stream, Graph **graph);
int vgpu_capture_info(Stream *stream, int *status, unsigned long long *id, Graph **graph);

/* graphs.c */
int vgpu_graph_create(Graph **graph);
void vgpu_graph_add_node(Graph *graph);
size_t vgpu_graph_nodes(const Graph *graph);
int vgpu_graph_instantiate(Graph **executable, Graph *graph);
int vgpu_graph_destroy(Graph *graph);
int vgpu_user_object_create(UserObject **made, void *value, void (*destroy)(void *),
                            unsigned count);
int vgpu_user_object_release(UserObject *object, unsigned count);
int vgpu_graph_retain(Graph *graph, UserObject *object, unsigned count, bool move);

#pragma GCC visibility pop

#endif
