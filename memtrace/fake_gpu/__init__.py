"""A GPU for a PyTorch that can't have one: tensors without data, and our own allocator.

Where the virtual GPU doesn't run (a PyTorch built for the CPU, macOS, Arm), tensors on ``cuda`` are
*fake*: they have a shape, a type and a place in memory, and no contents. PyTorch's rules for meta
tensors say what an operator returns; the simulator of its caching allocator says where that lies
and when there is no room; what kernels take below the dispatcher comes from a table. Everything on
the host is real. ``docs/fake_gpu.md`` says what is modelled and what isn't.
"""

#: The variable that says that a process runs on fake GPUs: their figures, as JSON.
VARIABLE = "MEMTRACE_FAKE_GPU"

#: What a process's manifest calls the operators whose scratch memory it couldn't know.
UNMODELLED = "unmodelled"
