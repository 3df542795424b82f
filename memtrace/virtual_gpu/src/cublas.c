/* cuBLAS: handles and their settings; every product is accepted and not computed. */
#include "vgpu.h"

#include <stdlib.h>

typedef struct {
    int math_mode, pointer_mode;
    Stream *stream;
} Handle;

EXPORT int cublasCreate_v2(Handle **handle)
{
    *handle = calloc(1, sizeof **handle);
    return *handle == NULL ? 3 : OK; /* 3: CUBLAS_STATUS_ALLOC_FAILED */
}

EXPORT int cublasDestroy_v2(Handle *handle)
{
    free(handle);
    return OK;
}

EXPORT int cublasSetStream_v2(Handle *handle, Stream *stream)
{
    handle->stream = stream;
    return OK;
}

EXPORT int cublasGetStream_v2(Handle *handle, Stream **stream)
{
    *stream = handle->stream;
    return OK;
}

EXPORT int cublasSetMathMode(Handle *handle, int mode)
{
    handle->math_mode = mode;
    return OK;
}

EXPORT int cublasGetMathMode(Handle *handle, int *mode)
{
    *mode = handle->math_mode;
    return OK;
}

EXPORT int cublasSetPointerMode_v2(Handle *handle, int mode)
{
    handle->pointer_mode = mode;
    return OK;
}

EXPORT int cublasGetPointerMode_v2(Handle *handle, int *mode)
{
    *mode = handle->pointer_mode;
    return OK;
}

EXPORT int cublasGetVersion_v2(Handle *handle, int *version)
{
    (void)handle;
    *version = CUDA_VERSION * 10;
    return OK;
}
