"""Record threads that allocate while the history is drained; print what was counted.

recorded_threads.py RUN
"""

import json
import sys
import threading

import torch

from memtrace import record_here
from tests.virtual_gpu.scripts.counting import counted

torch.empty(1, device="cuda")


def work(number: int) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for step in range(12_000):
            block = torch.empty(600 + number + 512 * (step % 5), device="cuda")
            if step % 1200 == 0:
                kept.append(block)


kept: list[torch.Tensor] = []
with record_here(sys.argv[1]) as one:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.05)
            one.checkpoint()
    boundary = [one.checkpoint(), counted()]
print(json.dumps([boundary]))
