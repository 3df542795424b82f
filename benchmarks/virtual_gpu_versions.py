"""Run the virtual GPU's tests with several versions of PyTorch, each in an environment of its own.

    python benchmarks/virtual_gpu_versions.py [VERSION…]

An environment takes about 6 GB while its tests run, and goes when they are over. The exit code is 1
if the tests of a version fail or its wheels can't be had.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

#: 2.8.0 is built for CUDA 12, whose structures differ; the others are for CUDA 13.
VERSIONS = ("2.8.0", "2.11.0", "2.13.0", "2.14.1", "2.15.0")
#: What memtrace itself and its tests need, besides torch.
OTHERS = (
    "filelock",
    "hypothesis",
    "numpy",
    "nvidia-ml-py",
    "pyarrow",
    "pytest",
    "rich",
    "transformers",
)
ROOT = Path(__file__).resolve().parent.parent


def passes(version: str, folder: Path) -> bool:
    """Whether the tests pass with a version of PyTorch, installed into ``folder``."""
    venv.create(folder, symlinks=True, with_pip=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    # Where a registry has no build for CUDA, pip takes another, and every test would be skipped.
    check = [python, "-c", "import torch, sys; sys.exit(torch.version.cuda is None)"]
    test = [python, "-m", "pytest", "-q", "--no-header", "tests/virtual_gpu"]
    # memtrace itself is not installed: its processes find it here.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in ([*install, f"torch=={version}", *OTHERS], check, test):
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            return False
    return True


def main(versions: list[str]) -> int:
    failed = []
    for version in versions or VERSIONS:
        print(f"torch {version}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            if not passes(version, Path(folder, "env")):
                failed.append(version)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
