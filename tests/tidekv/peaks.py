"""What prefills hold at their peaks: ``python -m tests.tidekv.peaks FILE``, where a card is.

FILE is a JSON list of command lines of ``tidekv run``, each a list of words. Prints for each, on a
line, what :func:`tidekv.plans.planning.tensors_at_peak` finds. One process for all, which imports
torch.
"""

import gc
import json
import sys
import tempfile
from pathlib import Path

import torch

from memtrace import record_here
from memtrace.analysis.summary import summarise
from memtrace.trace.reader import open_trace
from tidekv import running
from tidekv.arguments import parser_of
from tidekv.plans.planned import tensors_at_peak


def held(words: list[str]) -> dict[str, dict[int, int]]:
    """By component, how many tensors of each size."""
    parser = parser_of("python -m tests.tidekv.peaks", __doc__)
    parser.add_argument("--prompt-tokens", type=int)
    parser.set_defaults(device="cuda", untrained=True)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # each prefill makes its own
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run.memtrace"
        with record_here(run):
            running.run(parser.parse_args(words), stream=False)
        account = summarise(open_trace(run)).primary
        assert account is not None
        return {name: dict(found) for name, found in tensors_at_peak(account).items()}


if __name__ == "__main__":
    for case in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(held(case)), flush=True)
