"""Record what is rare in the allocator's history; print what it counted after each step.

recorded_blocks.py RUN
"""

import json
import sys
import threading

import torch

from memtrace import record_here, scopes
from tests.virtual_gpu.scripts.counting import counted

before = torch.empty(3 << 20, dtype=torch.int8, device="cuda")
steps = {}


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


with record_here(sys.argv[1]) as one:

    def step(name: str) -> None:
        steps[name] = [one.checkpoint(), counted()]

    scopes.retag(block(0), "Temp")  # which has no block
    step("seeded")
    side = torch.cuda.Stream()
    waiting = block(5 << 20)
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**9)  # about a second on a card
    waiting.record_stream(side)
    del waiting
    step("pending")
    torch.cuda.synchronize()
    again = block(512)
    step("completed")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        private = block(7 << 20)
    step("private pool")
    pieces = [block(1500) for _ in range(3000)]
    del pieces[::2]
    step("split")
    torch.cuda.empty_cache()
    step("emptied")
    free, total = torch.cuda.mem_get_info()
    cached = [block(free // 40) for _ in range(30)]
    del cached
    large = block(free * 7 // 8)  # only after giving back what is cached
    del large
    step("retried")
    try:
        block(2 * total)
    except torch.OutOfMemoryError:
        step("failed")

    def elsewhere() -> None:
        kept.append([block(700) for _ in range(500)])

    kept: list[list[torch.Tensor]] = []
    threads = [threading.Thread(target=elsewhere) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    step("threads")
print(json.dumps(steps))
