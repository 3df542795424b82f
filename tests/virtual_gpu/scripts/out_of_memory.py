"""Runs out of memory on a card of some 22 GiB, in the way that the first argument names."""

import sys

import torch

MiB, GiB = 1 << 20, 1 << 30


def empty(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def free() -> int:
    """What the device has, in whole segments, less a little."""
    return (torch.cuda.mem_get_info()[0] - 64 * MiB) // (2 * MiB) * (2 * MiB)


def fragmented() -> None:
    """Segments of 20 MiB with a live block of 9 MiB each."""
    blocks = [empty(9 * MiB) for _ in range(2 * (free() // (20 * MiB)))]
    del blocks[::2]
    empty(2 * GiB)


def wasted() -> None:
    """Segments of 20 MiB with two blocks of 8 MiB each; without segments there is room."""
    blocks = [empty(8 * MiB) for _ in range(int(0.95 * free()) // (8 * MiB))]
    del blocks


def pending() -> None:
    side = torch.cuda.Stream()
    whole = empty(GiB)
    del whole
    waits, kept = empty(700 * MiB), empty(300 * MiB)
    rest = empty(free())
    with torch.cuda.stream(side):
        waits.add_(1)
    waits.record_stream(side)
    del waits
    empty(700 * MiB)
    del kept, rest


def exhausted() -> None:
    blocks = []
    while True:
        blocks.append(empty(512 * MiB))


def fraction() -> None:
    torch.cuda.set_per_process_memory_fraction(0.25)
    exhausted()


def graph() -> None:
    kept = empty(16)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        workspace = empty(12 * GiB)
        del workspace
    blocks = []
    while True:
        blocks.append(empty(2 * GiB + kept.numel()))


if __name__ == "__main__":
    ways = (fragmented, wasted, pending, exhausted, fraction, graph)
    next(way for way in ways if way.__name__ == sys.argv[1])()
