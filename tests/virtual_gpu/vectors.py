"""Golden vectors of the installed PyTorch, recorded on virtual GPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from memtrace.allocator.settings import parse_version
from memtrace.virtual_gpu.launch import environment
from tests.virtual_gpu.running import ROOT, SCRIPTS

TORCH = parse_version(version("torch"))


def record(cases: Iterable[dict[str, Any]]) -> list[str]:
    """What the allocator answers to each case, as a line of a file of vectors; ``"null"`` where it
    was broken by one."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "allocator_vectors.py")],
        cwd=ROOT,
        input="".join(f"{json.dumps(case)}\n" for case in cases),
        capture_output=True,
        text=True,
        check=False,
        # Each failed request would be logged too.
        env={
            **os.environ,
            **environment(["a100-40g"]),
            "PYTHONPATH": str(ROOT),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
