"""Allocate and free at random, on streams and in pools, until memory runs out and after it.

random_program.py SEED RUN [FRACTION]: recorded into RUN from its middle on.
"""

import random
import sys

import torch

from memtrace import record_here

MIB = 1 << 20
seed = int(sys.argv[1])
draw = random.Random(seed)
if len(sys.argv) > 3:
    torch.cuda.set_per_process_memory_fraction(float(sys.argv[3]))
streams = [torch.cuda.Stream() for _ in range(2)]
pools = [torch.cuda.MemPool() for _ in range(2)] if seed % 2 else []
sizes = [300, 5000, 900_000, MIB, *(size * MIB for size in (3, 3, 9, 15, 30, 200, 900))]
live: list[torch.Tensor] = []


def block(size: int) -> torch.Tensor | None:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        draw.shuffle(live)
        del live[: len(live) // 2]
        return None


def step() -> None:
    kind = draw.random()
    found = None
    if kind < 0.5 or not live:
        found = block(draw.choice(sizes))
    elif kind < 0.9:
        live.pop(draw.randrange(len(live)))
    elif kind < 0.95:
        with torch.cuda.stream(draw.choice(streams)):
            found = block(3 * MIB)
        if found is not None:
            found.record_stream(torch.cuda.default_stream())
    elif kind < 0.96:
        torch.cuda.empty_cache()
    elif pools:
        with torch.cuda.use_mem_pool(draw.choice(pools)):
            found = block(draw.choice([4000, 3 * MIB, 50 * MIB]))
    if found is not None:
        live.append(found)


for _ in range(300):
    step()
with record_here(sys.argv[2]):
    for _ in range(1200):
        step()
    pools.clear()
    for _ in range(300):
        step()
