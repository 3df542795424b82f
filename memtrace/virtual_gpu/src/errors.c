/* What errors are called, and what is said to the user. */
#define _GNU_SOURCE
#include "vgpu.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const struct {
    int error;
    const char *name, *text;
} errors[] = {
    {OK, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {NOT_INITIALIZED, "cudaErrorInitializationError", "initialization error"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {ILLEGAL_STATE, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {NOT_FOUND, "cudaErrorSymbolNotFound", "named symbol not found"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {NOT_PERMITTED, "cudaErrorNotPermitted", "operation not permitted"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
};

const char *vgpu_error_name(int error)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error)
            return errors[i].name;
    return "cudaErrorUnknown";
}

const char *vgpu_error_text(int error)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error)
            return errors[i].text;
    return "unknown error";
}

void vgpu_say_once(const char *what)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static const char *said[32];
    static int n;
    pthread_mutex_lock(&lock);
    bool before = n == 32;
    for (int i = 0; i < n && !before; i++)
        before = strcmp(said[i], what) == 0;
    if (!before) {
        said[n++] = strdup(what);
        dprintf(STDERR_FILENO, "memtrace: %s\n", what);
    }
    pthread_mutex_unlock(&lock);
}
