/* What the sources of the stand-in of the CUDA runtime share. */
#ifndef RUNTIME_H
#define RUNTIME_H

#include "vgpu.h"

typedef struct {
    unsigned x, y, z;
} Dim3;

int runtime_result(int error); /* keeps it for cudaGetLastError, as every call does */

#endif
