"""What PyTorch's allocator counts itself, as the scripts print it."""

import torch


def counted() -> dict[str, int]:
    """Bytes now, by the names that the trace has for them."""
    stats = torch.cuda.memory_stats()
    names = ("allocated", "reserved", "active", "inactive_split", "requested")
    return {name: stats[f"{name}_bytes.all.current"] for name in names}
