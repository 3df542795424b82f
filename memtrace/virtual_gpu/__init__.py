"""PyTorch's build for CUDA on a machine without a GPU: its libraries are stand-ins.

Dispatch, PyTorch's CUDA host code, its caching allocator, the workspaces of cuBLAS and attention,
memory history and OOM are the real code. No kernel runs, so what a device holds is not known, and
times mean nothing. ``docs/virtual_gpu.md`` says what can't be had.
"""

#: The variable that says that a process runs on virtual GPUs: the number and the version of the
#: CUDA and the PyTorch that they were made for, then the devices, for the stand-ins.
VARIABLE = "MEMTRACE_VIRTUAL_GPU"

#: The variable that says, set to anything, that values aren't followed.
UNFOLLOWED = "MEMTRACE_VIRTUAL_GPU_UNFOLLOWED"

#: Set once a process has said that its GPUs are virtual, or fake; its children inherit it.
SAID = "MEMTRACE_VIRTUAL_GPU_SAID"

#: Exit code of a process without followed values that came to read one.
READ_UNFOLLOWED = 86
