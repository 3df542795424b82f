/* The CUDA runtime: kernels, which are accepted, counted and never run. */
#include "runtime.h"

#include <string.h>

static void *no_module;

EXPORT void **__cudaRegisterFatBinary(void *binary)
{
    (void)binary;
    return &no_module;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **module)
{
    (void)module;
}

EXPORT void __cudaUnregisterFatBinary(void **module)
{
    (void)module;
}

EXPORT void __cudaRegisterFunction(void **module, ...)
{
    (void)module;
}

EXPORT void __cudaRegisterVar(void **module, ...)
{
    (void)module;
}

EXPORT char __cudaInitModule(void **module)
{
    (void)module;
    return 1;
}

EXPORT int __cudaGetKernel(const void **kernel, const void *function)
{
    *kernel = function;
    return OK;
}

/* What stands between <<< and >>>: kept until the launch takes it, a few deep. */
typedef struct {
    Dim3 grid, block;
    size_t shared;
    Stream *stream;
} Configuration;

static __thread Configuration pushed[8];
static __thread unsigned depth;

EXPORT unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, Stream *stream)
{
    if (depth == sizeof pushed / sizeof *pushed)
        return 1;
    pushed[depth++] = (Configuration){grid, block, shared, stream};
    return 0;
}

EXPORT int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, Stream **stream)
{
    if (depth == 0)
        return runtime_result(INVALID_VALUE);
    Configuration last = pushed[--depth];
    *grid = last.grid;
    *block = last.block;
    *shared = last.shared;
    *stream = last.stream;
    return OK;
}

static int launch(const void *function, Stream *stream)
{
    return runtime_result(function == NULL ? INVALID_VALUE : vgpu_submit(stream));
}

EXPORT int cudaLaunchKernel(const void *function, Dim3 grid, Dim3 block, void **arguments,
                            size_t shared, Stream *stream)
{
    (void)grid, (void)block, (void)arguments, (void)shared;
    return launch(function, stream);
}

EXPORT int __cudaLaunchKernel(const void *kernel, Dim3 grid, Dim3 block, void **arguments,
                              size_t shared, Stream *stream)
{
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

EXPORT int cudaLaunchCooperativeKernel(const void *function, Dim3 grid, Dim3 block,
                                       void **arguments, size_t shared, Stream *stream)
{
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}

EXPORT int cudaLaunchKernelExC(const Configuration *configuration, const void *function,
                               void **arguments)
{
    (void)arguments;
    return launch(function, configuration->stream);
}

typedef struct {
    size_t shared, constant, local;
    int threads_per_block, registers, ptx, binary, cache_mode, dynamic_shared, carveout;
    int cluster[6];
    int reserved[16];
} FunctionAttributes;

/* CUB chooses its tiles by the architecture of its code, and knows those alone that it has. */
EXPORT int cudaFuncGetAttributes(FunctionAttributes *attributes, const void *function)
{
    (void)function;
    const Device *device = vgpu_device(vgpu_current_device());
    if (device == NULL)
        return runtime_result(NO_DEVICE);
    memset(attributes, 0, sizeof *attributes);
    attributes->threads_per_block = 1024;
    attributes->registers = 32;
    attributes->ptx = attributes->binary = device->code;
    attributes->dynamic_shared = STATIC_SHARED_MEMORY;
    return OK;
}

EXPORT int cudaFuncSetAttribute(const void *function, int attribute, int value)
{
    (void)function, (void)attribute, (void)value;
    return OK;
}

/* As many blocks as the threads of a multiprocessor allow; what registers and shared memory would
   allow is not known here. */
static int occupancy(int *blocks, int threads)
{
    const Device *device = vgpu_device(vgpu_current_device());
    if (device == NULL)
        return runtime_result(NO_DEVICE);
    int most = device->blocks_per_processor;
    *blocks = threads > 0 ? device->threads_per_processor / threads : most;
    if (*blocks > most)
        *blocks = most;
    return OK;
}

EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function,
                                                         int threads, size_t shared)
{
    (void)function, (void)shared;
    return occupancy(blocks, threads);
}

EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                                  int threads, size_t shared,
                                                                  unsigned flags)
{
    (void)function, (void)shared, (void)flags;
    return occupancy(blocks, threads);
}

EXPORT int cudaLibraryLoadData(void **library, ...)
{
    *library = &no_module;
    return OK;
}

EXPORT int cudaLibraryGetKernel(void **kernel, void *library, const char *name)
{
    (void)library, (void)name;
    *kernel = &no_module;
    return OK;
}

EXPORT int cudaLibraryUnload(void *library)
{
    (void)library;
    return OK;
}

EXPORT int cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device)
{
    (void)kernel, (void)attribute, (void)value, (void)device;
    return OK;
}
