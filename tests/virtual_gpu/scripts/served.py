"""Answer requests that use streams, a private pool and ever other sizes, in one process.

Usage: served.py RUN SOURCE STACKS; prints the allocator's counters after each request.
"""

import json
import sys

import torch

from memtrace import record_here, scopes

RUN, SOURCE, STACKS = sys.argv[1:]
MiB = 1 << 20


def answer(number: int, kept: list[torch.Tensor], side: torch.cuda.Stream, pool: object) -> None:
    size = (3, 17, 40)[number % 3]
    with scopes.phase("prefill"), scopes.component("Act"):
        parts = [
            torch.empty(size * MiB + 512 * n, dtype=torch.uint8, device="cuda") for n in range(4)
        ]
        small = [torch.empty(1000 + 300 * n, device="cuda") for n in range(5)]
        del parts[::2], small[1::2]
        with torch.cuda.stream(side):
            used = torch.empty(2 * MiB, dtype=torch.uint8, device="cuda")
        used.record_stream(torch.cuda.current_stream())
        if pool is not None:
            with torch.cuda.use_mem_pool(pool):
                small.append(torch.empty(MiB, dtype=torch.uint8, device="cuda"))
    if number % 4 == 3:
        kept.clear()
    with scopes.component("KV_res/compact"):
        kept.append(torch.empty((number + 1) * 100_000, dtype=torch.uint8, device="cuda"))


def main() -> None:
    with record_here(RUN, source=SOURCE, stacks=int(STACKS)):
        kept: list[torch.Tensor] = []
        side = torch.cuda.Stream()
        native = torch.cuda.memory.get_allocator_backend() == "native"
        pool = torch.cuda.MemPool() if native else None
        for number in range(12):
            with scopes.request(f"r{number}", prompt_tokens=1024):
                answer(number, kept, side, pool)
            stats = torch.cuda.memory_stats()
            names = ("allocated", "reserved", "active", "requested", "inactive_split")
            counted = {name: stats[f"{name}_bytes.all.current"] for name in names}
            print(json.dumps(counted), flush=True)


main()
