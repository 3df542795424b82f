"""Record golden vectors of our own, from the installed PyTorch's allocator on virtual GPUs.

    python -m tests.allocator.make_golden

writes tests/allocator/golden/torch-VERSION.jsonl.gz. The same streams are recorded each time, so
the file changes only with PyTorch, the streams or the virtual GPU.
"""

import gzip
from importlib.metadata import version
from pathlib import Path

from tests.allocator.streams import random_case
from tests.virtual_gpu.vectors import TORCH, record

GOLDEN = Path(__file__).parent / "golden"
#: Chosen so that every setting meets retries, ends of memory and given back segments, also with one
#: to four streams, cross-stream frees and private pools.
SEEDS = (*range(13), 26, 33, 35, 56, 99, 128, 156, 190, 248, 341, 477)


def main() -> None:
    lines = record(random_case(seed, TORCH, length=80) for seed in SEEDS)
    release = version("torch").partition("+")[0]
    path = GOLDEN / f"torch-{release}.jsonl.gz"
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    print(f"{path}: {len(lines)} streams, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
