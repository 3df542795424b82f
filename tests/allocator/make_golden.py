"""Record golden vectors of our own, from an installed PyTorch's allocator on virtual GPUs.

    python -m tests.allocator.make_golden

writes tests/allocator/golden/torch-VERSION.jsonl.gz. The same streams are recorded each time, so
the file changes only with PyTorch, the streams or the virtual GPU. For another version install it
into an environment of its own, as benchmarks/virtual_gpu_versions.py does.
"""

import gzip
import json
from importlib.metadata import version
from pathlib import Path

from tests.allocator.streams import random_case
from tests.virtual_gpu.vectors import TORCH, record

GOLDEN = Path(__file__).parent / "golden"
#: Chosen so that in each version every setting meets retries, ends of memory and given back
#: segments, also with one to four streams, cross-stream frees and nested private pools.
SEEDS = (0, 1, 2, 5, 40, 51, 91, 101, 120, 128, 156, 187, 191, 195, 211, 305, 315, 328, 384, 386)
#: Counters add up, so a few rows tell as much as all, and take little room.
EVERY = 12


def main() -> None:
    lines = []
    for line in record(random_case(seed, TORCH, length=80) for seed in SEEDS):
        stream = json.loads(line)
        rows = stream["stats_after_op"]
        stream["stats_after_op"] = {
            number: row
            for number, row in rows.items()
            if int(number) % EVERY == 0 or int(number) == len(rows) - 1
        }
        lines.append(json.dumps(stream, separators=(",", ":")))
    release = version("torch").partition("+")[0]
    path = GOLDEN / f"torch-{release}.jsonl.gz"
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    print(f"{path}: {len(lines)} streams, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
