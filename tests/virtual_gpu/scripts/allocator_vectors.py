"""Do streams of operations with PyTorch's own allocator, each with a virtual GPU of its own.

Reads golden vectors without answers, one JSON object a line, and prints them with answers; null
where PyTorch says that it is broken itself, as it may be after private pools with expandable
segments are given back. It is imported once; each stream has a process that meets its GPU for the
first time.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from memtrace.allocator.vectors import COUNTERS
from memtrace.devices import choose
from memtrace.virtual_gpu.launch import prepare

# Under its name before torch 2.10.
set_settings = getattr(
    torch._C,
    "_accelerator_setAllocatorSettings",
    getattr(torch._C, "_cuda_cudaCachingAllocator_set_allocator_settings", None),
)
KEPT = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free")
KEPT += ("segment_map", "segment_unmap", "oom")


class Player:
    """Does one stream of operations."""

    def __init__(self, case: dict[str, Any]) -> None:
        if case["settings"]:
            set_settings(case["settings"])
        torch.cuda.init()
        if case["memory_fraction"] is not None:
            torch.cuda.set_per_process_memory_fraction(case["memory_fraction"])
        self.soon = case.get("completion", "soon") == "soon"
        used = {op[3] for op in case["ops"] if op[0] == "a"}
        used |= {op[2] for op in case["ops"] if op[0] == "r"}
        # The allocator sorts by handles; theirs have no order in the program's own numbers.
        made = [torch.cuda.Stream() for _ in range(max(used, default=0))]
        made.sort(key=lambda stream: stream.cuda_stream)
        self.streams = [torch.cuda.default_stream(), *made]
        self.handles = {stream.cuda_stream: k for k, stream in enumerate(self.streams)}
        self.tensors: dict[int, torch.Tensor | None] = {}
        self.users: dict[int, set[int]] = {}
        self.pools: dict[int, tuple[int, int]] = {}
        self.ending = {op[1] for op in case["ops"] if op[0] == "e" and op[1:]}
        self.objects: dict[int, torch.cuda.MemPool] = {}
        self.results: list[int | str] = []
        self.messages: list[str] = []

    def play(self, case: dict[str, Any]) -> dict[str, Any]:
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=10**6)
        columns = [name for name in torch.cuda.memory_stats() if name in COUNTERS]
        rows = {}
        for number, (kind, *values) in enumerate(case["ops"]):
            getattr(self, f"do_{kind}")(*values)
            found = torch.cuda.memory_stats()
            rows[str(number)] = [found.get(name, 0) for name in columns]
            if kind == "e" and values:  # the operation before did that too, see do_x
                del rows[str(number - 1)]
        entries = torch.cuda.memory._snapshot()["device_traces"][0]
        trace = [self.event(entry) for entry in entries if entry["action"] in KEPT]
        return case | {
            "torch": torch.__version__.partition("+")[0],
            "addresses": "reused",
            "alloc_result": self.results,
            "messages": self.messages,
            "columns": columns,
            "stats_after_op": rows,
            "trace": trace,
        }

    def event(self, entry: dict[str, Any]) -> list[Any]:
        stream = self.handles[entry["stream"]]
        handle = stream and 0x100000 + stream * 0x1000
        place = entry["device_free" if entry["action"] == "oom" else "addr"]
        return [entry["action"], place, entry["size"], handle]

    def do_a(self, block: int, size: int, stream: int) -> None:
        if self.soon:
            torch.cuda.synchronize()
        else:
            self.work(0)  # a queue that is asked twice at rest would be done
        try:
            with torch.cuda.stream(self.streams[stream]):
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            self.tensors[block] = tensor
            self.results.append(tensor.data_ptr())
        except torch.OutOfMemoryError as error:
            self.tensors[block] = None
            self.results.append("oom")
            self.messages.append(str(error))

    def do_f(self, block: int) -> None:
        for stream in self.users.pop(block, ()):
            self.work(stream)  # which the block then waits for
        del self.tensors[block]

    def do_r(self, block: int, stream: int) -> None:
        tensor = self.tensors[block]
        if tensor is not None:
            tensor.record_stream(self.streams[stream])
            self.users.setdefault(block, set()).add(stream)

    def work(self, stream: int) -> None:
        with torch.cuda.stream(self.streams[stream]):
            torch.cuda._sleep(1)

    def do_e(self, pool: int | None = None) -> None:
        if pool is None:
            torch.cuda.empty_cache()

    def do_p(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def do_A(self) -> None:
        torch.cuda.reset_accumulated_memory_stats()

    def do_b(self, pool: int) -> None:
        new = pool not in self.pools
        if new and pool in self.ending:
            self.objects[pool] = torch.cuda.MemPool()
            self.pools[pool] = self.objects[pool].id
        elif new:
            self.pools[pool] = torch.cuda.graph_pool_handle()
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, self.pools[pool])
        if new and pool in self.ending:
            torch._C._cuda_releasePool(0, self.pools[pool])  # the object is a use of its own

    def do_d(self, pool: int) -> None:
        torch._C._cuda_endAllocateToPool(0, self.pools[pool])

    def do_x(self, pool: int) -> None:
        if pool in self.objects and self.objects[pool].use_count() == 1:
            del self.objects[pool]  # releases it, and empties its cache
        else:
            torch._C._cuda_releasePool(0, self.pools[pool])


def played(case: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return Player(case).play(case)
    except RuntimeError as error:
        if "INTERNAL ASSERT" in str(error):
            return None
        raise


@cache
def variables(total: int, outside: int) -> Mapping[str, str]:
    """The environment with a card of so much memory."""
    (card,) = choose("a100-40g")
    return prepare([replace(card, total=total, context=outside)]).variables


def main() -> None:
    for line in sys.stdin:
        case = json.loads(line)
        os.environ.update(variables(case["total_memory"], case["used_outside"]))
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            print(json.dumps(played(case), separators=(",", ":")), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"the stream failed: {line}")


if __name__ == "__main__":
    main()
