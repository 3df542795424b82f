"""``memtrace record --virtual-gpu``, as users call it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memtrace.trace.manifest import read_manifest

RECORD = [sys.executable, "-m", "memtrace", "record", "-o", "run"]

PRODUCT = """
import sys, torch
print("memtrace.virtual_gpu" in sys.modules)
x = torch.ones(1024, 1024, device="cuda")
print(torch.cuda.get_device_name(), (x @ x).shape)
"""


def record(
    cwd: Path, cards: str, *command: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*RECORD, "--virtual-gpu", cards, "--", *command],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def python(text: str) -> tuple[str, str, str]:
    return sys.executable, "-c", text


def said(done: "subprocess.CompletedProcess[str]") -> str:
    """The one line on stderr."""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_script_runs_on_a_card_that_isnt_there(cache: Path, tmp_path: Path) -> None:
    done = record(tmp_path, "2×a100-40g", *python(PRODUCT))
    assert done.returncode == 0, done.stderr
    assert "NVIDIA A100-SXM4-40GB torch.Size([1024, 1024])" in done.stdout
    assert done.stderr.count("virtual GPU 2× NVIDIA A100-SXM4-40GB: nothing is computed") == 1
    manifest = read_manifest(tmp_path / "run")
    assert manifest["knowledge"] == "virtual"
    devices = manifest["virtual_gpu"]["devices"]
    assert [device["total"] for device in devices] == [42_298_834_944] * 2
    assert devices[0]["sources"]["context"] == "unknown"
    for command in (["report", "run"], ["compare", "run", "run"]):
        told = subprocess.run(
            [sys.executable, "-m", "memtrace", *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "virtual" in told.stdout, told.stderr


def test_children_dont_say_it_again(cache: Path, tmp_path: Path) -> None:
    script = "import subprocess, sys, torch; subprocess.run([sys.executable, '-c', 'import torch'])"
    assert record(tmp_path, "l4-24g", *python(script)).stderr.count("nothing is computed") == 1


def test_ordinary_runs_know_nothing_of_it(tmp_path: Path) -> None:
    script = "import sys, torch; print([m for m in sys.modules if 'virtual_gpu' in m])"
    done = subprocess.run(
        [*RECORD, "--", *python(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "[]\n", done.stderr
    assert read_manifest(tmp_path / "run")["knowledge"] == "measured"


class TestRefusals:
    """Each is one sentence; the command isn't started where that can be known before."""

    def test_an_unknown_card(self, tmp_path: Path) -> None:
        done = record(tmp_path, "a100-41g", *python("print('started')"))
        assert (done.returncode, done.stdout) == (2, "")
        assert "'a100-41g' is no known card; known are a100-40g, " in said(done)
        assert not (tmp_path / "run").exists()

    def test_no_compiler(self, cache: Path, tmp_path: Path) -> None:
        done = record(
            tmp_path, "l4-24g", *python(""), PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path)
        )
        assert done.returncode == 125
        assert "there is no cc on PATH; install a C compiler" in said(done)
        assert not (tmp_path / "run").exists()

    def test_a_cache_that_cant_be_written(self, cache: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        done = record(tmp_path, "l4-24g", *python(""), XDG_CACHE_HOME=str(tmp_path / "file"))
        assert done.returncode == 125
        assert "set XDG_CACHE_HOME to a folder that can be written" in said(done)

    def test_another_interpreter_without_torch(self, tmp_path: Path) -> None:
        bare = tmp_path / "python3"
        bare.write_text("#!/bin/sh\n")
        bare.chmod(0o755)
        done = record(tmp_path, "l4-24g", str(bare), "-c", "import torch")
        assert done.returncode == 125
        assert f"{bare} has no torch" in said(done)

    def test_a_torch_without_cuda_behind_a_shell(self, cache: Path, tmp_path: Path) -> None:
        fake = tmp_path / "torch"
        fake.mkdir()
        (fake / "__init__.py").write_text("from . import version\n__version__ = '2.14.1+cpu'\n")
        (fake / "version.py").write_text("cuda = None\n")
        line = f"PYTHONPATH=$PYTHONPATH:{tmp_path} {sys.executable} -c 'import torch; print(1)'"
        # On PYTHONPATH it comes before the environment's own.
        done = record(tmp_path, "l4-24g", "sh", "-c", line)
        assert (done.returncode, done.stdout) == (1, "")
        assert "torch 2.14.1+cpu of" in done.stderr
        assert "is not built for CUDA" in done.stderr
        assert "Traceback" not in done.stderr

    def test_what_it_hasnt(self, cache: Path, tmp_path: Path) -> None:
        script = """
import torch, torch.distributed as dist
from triton.runtime.jit import JITFunction
for refused in (
    lambda: dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1),
    lambda: JITFunction.run(None, grid=(1,), warmup=False),
    lambda: torch.linalg.inv(torch.empty(8, 8, device="cuda")),
):
    try:
        refused()
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""
        done = record(tmp_path, "l4-24g", *python(script))
        nccl, triton, solver = done.stdout.splitlines()
        assert nccl == "the virtual GPU has no NCCL; use the backend gloo"
        assert triton == "the virtual GPU can't run Triton kernels; use PyTorch's own kernels"
        assert solver.startswith("cusolver error")
        assert "memtrace: the virtual GPU has no cuSOLVER" in done.stderr

    @pytest.mark.slow
    def test_what_torch_compile_generates(self, cache: Path, tmp_path: Path) -> None:
        script = """
import torch
on_host = torch.compile(lambda x: x * 2 + 1)(torch.ones(8))
print(on_host.sum().item())
torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device="cuda"))
"""
        done = record(tmp_path, "l4-24g", *python(script))
        assert (done.returncode, done.stdout) == (1, "24.0\n")
        assert "run the model without torch.compile" in done.stderr
