/* cuBLASLt: descriptors that nobody reads, and one algorithm for every product. */
#include "vgpu.h"

#include <string.h>

static int a_handle;

EXPORT int cublasLtCreate(void **handle)
{
    *handle = &a_handle;
    return OK;
}

EXPORT int cublasLtMatmulDescCreate(void **descriptor, ...)
{
    *descriptor = &a_handle;
    return OK;
}

EXPORT int cublasLtMatrixLayoutCreate(void **layout, ...)
{
    *layout = &a_handle;
    return OK;
}

EXPORT int cublasLtMatmulPreferenceCreate(void **preference)
{
    *preference = &a_handle;
    return OK;
}

EXPORT size_t cublasLtGetVersion(void)
{
    return CUDA_VERSION * 10;
}

typedef struct {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} Heuristic;

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c,
                                          void *d, void *preference, int wanted,
                                          Heuristic *results, int *found)
{
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    *found = wanted > 0;
    if (*found) {
        memset(results, 0, sizeof *results);
        results->waves = 1;
    }
    return OK;
}

EXPORT int cublasLtMatmulAlgoCheck(void *handle, void *operation, void *a, void *b, void *c,
                                   void *d, const void *algorithm, Heuristic *result)
{
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)algorithm;
    memset(result, 0, sizeof *result);
    return OK;
}
