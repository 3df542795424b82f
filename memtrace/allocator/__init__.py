"""PyTorch's CUDA caching allocator: what it hands out, and what its segments look like."""
