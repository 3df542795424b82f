"""Record a random model of each family on CUDA, in this process; print what was left to other.

families.py RUNS
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch

if "MEMTRACE_VIRTUAL_GPU" in os.environ:
    from memtrace.virtual_gpu.child import enter

    enter(torch)

from memtrace import record_here
from memtrace.analysis.accounts import accounts
from memtrace.analysis.identities import check
from memtrace.analysis.process import process_memory
from memtrace.trace.reader import open_trace
from tests.record.scripts import transformer

found = {}
for number, family in enumerate(
    ["llama", "qwen2", "mistral", "gpt_neox", "mixtral", "gemma", "gemma3"]
):
    grad = ("no_grad", "inference_mode")[number % 2]
    attention = ("sdpa", "eager")[number // 2 % 2]
    run = Path(sys.argv[1]) / family
    with record_here(run):
        kept = transformer.run(family, "cuda", grad, attention, "generate")
    storages = {p.untyped_storage().data_ptr(): p.nbytes for p in kept[0].parameters()}
    del kept
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # or the next recording finds it there, unexplained
    [process] = open_trace(run).processes
    account = next(one for one in accounts(process) if one.device == "cuda:0")
    peak = account.allocated.peak_event
    found[family] = {
        "weights": sum(storages.values()),
        "allocated": account.allocated.peak,
        **{name: series.read_one(peak) for name, series in account.components.items()},
        "problem": check(account, process_memory(open_trace(run), process)).problem,
    }
print(json.dumps(found))
