/* cuSPARSE: not there; this is the one function of it that returns no status. */
#include "vgpu.h"

EXPORT const char *cusparseGetErrorString(int status)
{
    (void)status;
    return "the virtual GPU has no cuSPARSE";
}
