"""What a memory budget costs a test, in CPU time: python benchmarks/budgets.py

In one session of pytest a prefill of 1,024 tokens by a small Llama runs with and without a budget
around it, alternately. The ratio is that of the prefill itself; what measuring takes before and
after it, whatever it does, is said apart. Medians of nine.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SUITE = """
import gc
import time
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

def test_cost(memory_budget, request):
    torch.set_num_threads(1)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=256, intermediate_size=688, vocab_size=4096,
                                         num_hidden_layers=8, num_attention_heads=8,
                                         num_key_value_heads=4))

    def prefill():
        start = time.process_time()
        with torch.inference_mode():
            model(torch.ones(1, 1024, dtype=torch.long))
        return time.process_time() - start

    def budgeted():
        start = time.process_time()
        with memory_budget(peak="4 GiB"):
            inside = prefill()
        return inside, time.process_time() - start - inside

    prefill(), budgeted()
    plain, inside, around = zip(*((prefill(), *budgeted()) for _ in range(9)))
    ratio = median(a / b for a, b in zip(inside, plain))
    print(f"{request.config.getoption('memory_stacks')} frames kept: CPU budgeted / plain "
          f"{ratio:.3f}, and {median(around):.3f} s around it "
          f"({median(plain):.3f} s plain, {len(gc.get_objects()):,} Python objects)")
"""

IMPORT = """
import time
import pytest
start = time.perf_counter()
import memtrace.pytest_plugin
print(time.perf_counter() - start)
"""


def main() -> None:
    run = [sys.executable, "-c", IMPORT]
    took = [float(subprocess.run(run, capture_output=True, check=True).stdout) for _ in range(9)]
    print(f"import of the plugin {1000 * min(took):.1f} ms at best (limit 20)")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_cost.py").write_text(SUITE)
        for stacks in ("0", "8"):
            pytest = [sys.executable, "-m", "pytest", "-q", "-s", f"--memory-stacks={stacks}"]
            done = subprocess.run(
                pytest, cwd=folder, env=os.environ, capture_output=True, text=True
            )
            print(*(line for line in done.stdout.splitlines() if "frames kept" in line))


if __name__ == "__main__":
    main()
