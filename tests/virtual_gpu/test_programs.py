"""Programs that know nothing of memtrace, recorded on virtual cards through the command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memtrace.trace.reader import open_trace
from tests.virtual_gpu.running import SCRIPTS

MEMTRACE = [sys.executable, "-m", "memtrace"]


def run(*arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*MEMTRACE, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def record(cwd: Path, card: str, *command: object) -> "subprocess.CompletedProcess[str]":
    return run(
        "record", "-o", "run", "--virtual-gpu", card, "--", sys.executable, *command, cwd=cwd
    )


def report(cwd: Path) -> Any:
    return json.loads(run("report", "run", "--json", cwd=cwd).stdout)


@pytest.fixture(scope="module")
def failed(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("failed")
    return folder, record(folder, "rtx-4090-24g", SCRIPTS / "infer.py")


def test_a_script_that_is_too_large_dies_as_it_would_on_the_card(failed: Any) -> None:
    _, done = failed
    assert done.returncode == 1
    assert "read" not in done.stdout
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" in done.stderr
    assert "mlp" in done.stderr or "modeling_llama.py" in done.stderr


def test_the_trace_explains_the_out_of_memory_error(failed: Any) -> None:
    folder, done = failed
    found = report(folder)
    oom = found["oom"]
    assert found["ooms"] == 1
    assert found["identities"]["hold"], found["identities"]["problem"]
    assert f"{oom['free'] / 2**30:.2f} GiB is free" in done.stderr
    assert oom["total"] == oom["free"] + oom["reserved"] + oom["outside"]
    assert sum(oom["components"].values()) == oom["allocated"]
    assert oom["largest_free_block"] < oom["requested"]
    assert oom["at"]["phase"] == "prefill"
    assert oom["at"]["layer"] is not None
    assert oom["verdict"].startswith("3.50 GiB were asked for")
    text = run("report", "run", cwd=folder).stdout
    assert "out of memory asking for 3.50 GiB on cuda:0" in text
    assert "known       virtual" in text


def test_the_same_script_completes_on_a_larger_card(cache: Path, tmp_path: Path) -> None:
    done = record(tmp_path, "h100-80g", SCRIPTS / "infer.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "read (1, 1, 128256)\n"
    found = report(tmp_path)
    assert found["oom"] is None
    assert found["own_peak"]["other"] < 0.02 * found["peak"]["allocated"]
    total = found["beside"]["device_total"]
    assert found["headroom"] == total - found["reserved_peak"] > 0
    text = run("report", "run", cwd=tmp_path).stdout
    assert "NVIDIA H100 80GB HBM3" in text
    assert f"{found['reserved_peak'] / 2**30:.2f} GiB reserved at most" in text
    values = [process["values"] for process in found["processes"]]
    assert [one["unknown_reads"] for one in values] == [0]


def test_a_card_beside_a_larger_host_is_what_counts(cache: Path, tmp_path: Path) -> None:
    program = "import torch; a = torch.ones(1 << 22); b = torch.ones(9, device='cuda')"
    assert record(tmp_path, "l4-24g", "-c", program).returncode == 0
    found = json.loads(run("report", "run", "--json", cwd=tmp_path).stdout)
    assert found["device"] == "cuda:0"
    assert "never used" not in run("report", "run", cwd=tmp_path).stdout


def test_a_card_that_was_never_used_is_said_to_be(cache: Path, tmp_path: Path) -> None:
    assert record(tmp_path, "l4-24g", "-c", "import torch; torch.ones(9)").returncode == 0
    assert "the virtual card was never used" in run("report", "run", cwd=tmp_path).stdout


CHILD = """
import torch
import torch.multiprocessing as multiprocessing

def work(size):
    held = torch.empty(size, dtype=torch.int8, device="cuda:1")
    assert torch.cuda.memory_allocated(1) == size

if __name__ == "__main__":
    kept = torch.empty(3 << 20, dtype=torch.int8, device="cuda")
    child = multiprocessing.get_context("spawn").Process(target=work, args=(5 << 20,))
    child.start()
    child.join()
    assert child.exitcode == 0
"""


def test_a_spawned_child_has_a_history_of_its_own(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CHILD)
    done = record(tmp_path, "2×l4-24g", "script.py")
    assert done.returncode == 0, done.stderr
    peaks = {(one["device"], one["peak"]) for one in report(tmp_path)["accounts"]}
    assert {("cuda:0", 3 << 20), ("cuda:1", 5 << 20)} <= peaks


FORK = """
import os
import torch
kept = torch.empty(3 << 20, dtype=torch.int8, device="cuda")
if os.fork() == 0:
    host = torch.zeros(1000)
    del host
    os._exit(0)
os.wait()
del kept
print(torch.cuda.memory_allocated())
"""


def test_a_fork_leaves_the_parents_history_alone(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FORK)
    done = record(tmp_path, "l4-24g", "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0\n"
    found = report(tmp_path)
    assert found["device"] == "cuda:0"
    assert found["identities"]["hold"], found["identities"]["problem"]
    assert found["peak"]["allocated"] == 3 << 20
    assert found["end"]["allocated"] == 0


def test_an_allocator_without_history_is_booked_by_its_tensors(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    script = "import torch; kept = torch.empty(3 << 20, dtype=torch.int8, device='cuda')"
    done = record(tmp_path, "l4-24g", "-c", script)
    assert done.returncode == 0, done.stderr
    found = report(tmp_path)
    assert found["peak"]["allocated"] == 3 << 20
    assert found["peak"]["allocator"] is None
    assert any("cudaMallocAsync keeps no history" in text for text in found["unseen"])


def test_host_tensors_before_cuda_stay_booked(cache: Path, tmp_path: Path) -> None:
    script = (
        "import torch; a = torch.zeros(1 << 20); b = a.to('cuda'); del a; "
        "c = b.cpu(); m = torch.nn.Linear(1000, 1000)"
    )
    done = record(tmp_path, "l4-24g", "-c", script)
    assert done.returncode == 0, done.stderr
    [process] = open_trace(tmp_path / "run").processes
    devices = {process.contexts["device"][c] for c in process.events["context"]}
    assert devices == {"cpu", "cuda:0"}
    cpu = next(one for one in report(tmp_path)["accounts"] if one["device"] == "cpu")
    assert cpu["peak"] == 4 << 20


def test_an_oom_is_kept_even_if_the_process_ends_at_once(cache: Path, tmp_path: Path) -> None:
    script = (
        "import os, torch\n"
        "kept = torch.empty(20 << 30, dtype=torch.int8, device='cuda')\n"
        "try:\n    torch.empty(20 << 30, dtype=torch.int8, device='cuda')\n"
        "except torch.OutOfMemoryError:\n    os.kill(os.getpid(), 9)\n"
    )
    done = record(tmp_path, "l4-24g", "-c", script)
    assert done.returncode == 128 + 9
    found = report(tmp_path)
    assert found["oom"]["requested"] == 20 << 30
    assert found["oom"]["allocated"] == 20 << 30
    assert "missing however memory is arranged" in found["oom"]["verdict"]
    assert found["death"]["signal"] == 9
    text = run("report", "run", cwd=tmp_path).stdout
    assert "a process was killed, and what it did in its last moment" in " ".join(text.split())


def test_a_killed_process_leaves_its_finished_requests(cache: Path, tmp_path: Path) -> None:
    script = (
        "import os, torch\n"
        "from memtrace import scopes\n"
        "with scopes.request('q1'), scopes.component('KV_res/full'):\n"
        "    kept = torch.empty(5 << 20, dtype=torch.int8, device='cuda')\n"
        "import time; time.sleep(0.7)\n"  # the request's own row is written twice a second
        "os.kill(os.getpid(), 9)\n"
    )
    assert record(tmp_path, "l4-24g", "-c", script).returncode == 128 + 9
    found = report(tmp_path)
    assert found["peak"]["details"] == {"KV_res/full": 5 << 20}
    assert [request["name"] for request in found["requests"]] == ["q1"]
    assert found["identities"]["hold"], found["identities"]["problem"]


def test_a_thread_begins_in_the_scope_that_started_it(cache: Path, tmp_path: Path) -> None:
    script = (
        "import threading, torch\n"
        "from memtrace import scopes\n"
        "torch.cuda.init()\n"
        "kept = []\n"
        "def work():\n"
        "    kept.append(torch.empty(5 << 20, dtype=torch.int8, device='cuda'))\n"
        "with scopes.phase('prefill'), scopes.layer(3):\n"
        "    thread = threading.Thread(target=work)\n"
        "    thread.start()\n"
        "    thread.join()\n"
    )
    done = record(tmp_path, "l4-24g", "-c", script)
    assert done.returncode == 0, done.stderr
    [made] = report(tmp_path)["top"]
    assert (made["bytes"], made["phase"], made["layers"]) == (5 << 20, "prefill", [3])
