"""Budgets among other plugins, threads and processes, in sessions of processes of their own."""

import sys

import pytest

from memtrace.virtual_gpu.launch import environment
from tests.budgeting import QUIET, measured, read, run, words, write

pytest_plugins = ["pytester"]


def session(pytester: pytest.Pytester, source: str, *args: str) -> pytest.RunResult:
    """Run the tests in ``source`` in a pytest of their own."""
    write(pytester, source)
    return pytester.runpytest_subprocess(*QUIET, "-rA", "--memory-json=report.json", *args)


WORKLOAD = """
@budget(peak="4 MiB", name="theirs")
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_theirs(n):
    mib(n)
    torch.relu(torch.ones(64, 64) @ torch.ones(64, 64))

@budget(peak="50 % of theirs", tolerance="48 KiB")
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ours(n):
    mib(n // 2)
    torch.relu(torch.ones(64, 64) @ torch.ones(64, 64))

@budget(peak="1 MiB")
def test_over():
    mib(2)
"""


@pytest.mark.slow
def test_xdist(pytester: pytest.Pytester) -> None:
    """The same bytes, outcomes and files as without it; baselines are shared."""
    plain = session(pytester, WORKLOAD, "--memory-save=plain")
    alone = read(pytester)
    spread = session(pytester, WORKLOAD, "-n", "2", "--memory-save=spread", "--junitxml=x.xml")
    assert read(pytester) == alone
    assert words(spread) == words(plain)
    # test_ours[1] takes less than half of what test_theirs[1] does, and so on.
    assert spread.parseoutcomes() == {"passed": 8, "over": 1}
    spread.stdout.fnmatch_lines(
        [
            "*_ test_over _*",
            "*largest allocations then:",
            "OVER BUDGET peak 2.0 MiB > 1.0 MiB (+1.0 MiB) test_it.py::test_over",
        ]
    )
    saved = pytester.path / ".memory_budgets"
    assert (saved / "plain.json").read_bytes() == (saved / "spread.json").read_bytes()
    assert '"memory.cpu.peak" value="2097152"' in (pytester.path / "x.xml").read_text()


@pytest.mark.slow
def test_reruns(pytester: pytest.Pytester) -> None:
    """A breach is run again; each run is measured anew and nothing of the last one is held."""
    source = """
RUNS = []

@pytest.mark.flaky(reruns=3)
@budget(peak="1 MiB", end="0 B")
def test_flaky():
    RUNS.append(1)
    mib(4 - len(RUNS))

@pytest.mark.flaky(reruns=1)
@budget(peak="1 MiB")
def test_always_over():
    mib(2)
"""
    result = session(pytester, source)
    assert result.parseoutcomes() == {"passed": 1, "over": 1, "rerun": 3}
    assert read(pytester)["test_flaky"]["peak"] == 1 << 20
    assert len(list((pytester.path / ".pytest_cache/d/memory").iterdir())) == 1


@pytest.mark.slow
def test_asyncio(pytester: pytest.Pytester) -> None:
    """Tasks, and threads that they hand work to."""
    source = """
import asyncio

async def allocate(n):
    with scopes.component("Temp"):
        await asyncio.sleep(0)
        x = await asyncio.to_thread(mib, n)
        await asyncio.sleep(0.05)

@pytest.fixture
async def cache():
    yield mib(1)

@budget(peak="3 MiB", warmup=1)
@pytest.mark.asyncio
async def test_tasks(cache=None):
    await asyncio.gather(allocate(1), allocate(2))

@budget(peak="2 MiB", Temp="1 MiB")
@pytest.mark.asyncio
async def test_tasks_over(memory_budget):
    with memory_budget(total="3 MiB"):
        await asyncio.gather(allocate(1), allocate(2))
"""
    result = session(pytester, source)
    assert words(result) == {"test_tasks": "PASSED", "test_tasks_over": "OVER"}
    assert read(pytester)["test_tasks_over 1"]["total"] == 3 << 20


def test_unittest(pytester: pytest.Pytester) -> None:
    source = """
import unittest

class TestOld(unittest.TestCase):
    def setUp(self):
        self.x = mib(1)

    @budget(peak="1 MiB")
    def test_within(self):
        pass

    @budget(peak="1 MiB")
    def test_over(self):
        mib(1)

    @budget(peak="1 MiB")
    def test_fails(self):
        mib(1)
        self.fail("mine")

    @budget(peak="1 MiB", warmup=1)
    def test_again(self):
        pass
"""
    result = run(pytester, source, "-rA")
    assert words(result) == {
        "TestOld::test_within": "PASSED",
        "TestOld::test_over": "OVER",
        "TestOld::test_fails": "FAILED",
        "TestOld::test_again": "FAILED",
    }
    result.stdout.fnmatch_lines(["*AssertionError: mine", "*- memory budget: peak 2.0 MiB > *"])
    result.stdout.fnmatch_lines(["a test of unittest can't be run again: no warm-up, no plateau"])


def test_threads(pytester: pytest.Pytester) -> None:
    """Those that a test starts are its own; one from before is not blamed on it, with a warning."""
    source = """
import threading
import time

GO, DONE = threading.Event(), threading.Event()

def background():
    while not DONE.is_set():
        if GO.wait(0.01):
            mib(8)
            time.sleep(0.001)

@pytest.fixture(scope="module", autouse=True)
def server():
    thread = threading.Thread(target=background, name="background")
    thread.start()
    yield
    DONE.set()
    thread.join()

def test_starts_the_server():
    pass

@budget(peak="1 MiB")
def test_beside_another():
    GO.set()
    time.sleep(0.1)
    mib(1)

@budget(peak="2 MiB")
def test_own():
    thread = threading.Thread(target=mib, args=(3,))
    thread.start()
    thread.join()
"""
    result = run(pytester, source, "-rA")
    assert words(result)["test_beside_another"] == "PASSED"
    assert words(result)["test_own"] == "OVER"
    result.stdout.fnmatch_lines(
        ["*can't see what threads allocate that ran before it: background;*"]
    )


@pytest.mark.slow
def test_processes(pytester: pytest.Pytester) -> None:
    """However they are started; what runs at once adds up; what a fork inherits doesn't count."""
    source = """
import multiprocessing
import subprocess
import sys

@pytest.fixture
def ours():
    return mib(4)

@budget(peak="6 MiB")
def test_subprocess(ours):
    code = "import torch; torch.empty(3 << 20, dtype=torch.uint8)"
    subprocess.run([sys.executable, "-c", code], check=True)

@budget(peak="6 MiB")
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_multiprocessing(ours, how):
    process = multiprocessing.get_context(how).Process(target=mib, args=(3,))
    process.start()
    process.join()
    assert process.exitcode == 0

@budget(peak="6 MiB")
def test_one_after_another():
    for _ in range(2):
        process = multiprocessing.get_context("fork").Process(target=mib, args=(5,))
        process.start()
        process.join()

def test_later():
    # Nothing of a recording is left in the environment.
    code = "import sys; sys.exit('memtrace' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
"""
    result = session(pytester, source)
    assert words(result) == {
        "test_subprocess": "OVER",
        "test_multiprocessing[fork]": "OVER",
        "test_multiprocessing[spawn]": "OVER",
        "test_one_after_another": "PASSED",
        "test_later": "PASSED",
    }
    found = read(pytester)
    assert found["test_multiprocessing[fork]"]["peak"] == 7 << 20
    assert found["test_multiprocessing[spawn]"]["peak"] == 7 << 20
    assert found["test_subprocess"]["peak"] == 7 << 20
    assert found["test_one_after_another"]["peak"] == 5 << 20


@pytest.mark.slow
def test_processes_of_a_recorded_pytest(pytester: pytest.Pytester) -> None:
    """Under memtrace record a test's processes are its own, too, and its workers' aren't."""
    source = """
import multiprocessing

@budget(peak="2 MiB")
@pytest.mark.parametrize("n", [2, 3])
def test_fork(n):
    process = multiprocessing.get_context("fork").Process(target=mib, args=(n,))
    process.start()
    process.join()

@budget(peak="2 MiB")
@pytest.mark.parametrize("n", range(6))
def test_beside(n):
    mib(1)
"""
    write(pytester, source)
    result = pytester.run(
        *(sys.executable, "-m", "memtrace", "record", "-q", "-o", "run", "--"),
        *(sys.executable, "-m", "pytest", *QUIET, "-rA", "-n", "2"),
    )
    assert result.parseoutcomes() == {"passed": 7, "over": 1}
    assert words(result)["test_fork[3]"] == "OVER"
    result.stdout.fnmatch_lines(["more of it: memtrace report run"])


@pytest.mark.slow
def test_a_session_in_a_test(pytester: pytest.Pytester) -> None:
    """A budgeted test may run a pytest that has budgets, in its own process or another."""
    source = '''
pytest_plugins = ["pytester"]

INNER = """
import pytest, torch

@pytest.mark.memory_budget(peak="1 MiB")
@pytest.mark.parametrize("n", [1, 2])
def test_inner(n):
    torch.empty(n << 20, dtype=torch.uint8)
"""

@budget(peak="2 MiB")
def test_outer(pytester):
    pytester.makepyfile(INNER)
    for how in (pytester.runpytest_inprocess, pytester.runpytest_subprocess):
        assert how().parseoutcomes() == {"passed": 1, "over": 1}
'''
    result = session(pytester, source)
    result.assert_outcomes(passed=1)
    assert read(pytester)["test_outer"]["peak"] == 2 << 20


@pytest.mark.slow
def test_the_workspace_of_cublas(pytester: pytest.Pytester) -> None:
    """A first matrix product keeps it; a warm-up leaves it out, and the failure names it."""
    source = """
def product():
    a = torch.ones(1024, 1024, device="cuda")
    a @ a

@budget(peak="8 MiB", Act="0 B")
@pytest.mark.parametrize("n", [1, 2])
def test_cold(n):
    product()
    torch._C._cuda_clearCublasWorkspaces()

@budget(peak="8 MiB", end="0 B", warmup=1)
def test_warm():
    product()
"""
    write(pytester, source)
    result = pytester.run(
        *(sys.executable, "-m", "memtrace", "record", "-q", "-o", "run"),
        *("--virtual-gpu", "a100-40g", "--", sys.executable, "-m", "pytest", *QUIET, "-rA"),
    )
    assert words(result) == {"test_cold[1]": "OVER", "test_cold[2]": "OVER", "test_warm": "PASSED"}
    result.stdout.fnmatch_lines(
        ["memory on cuda:0,*", "*backend holds workspaces that kernels keep from their first use*"]
    )


@pytest.mark.slow
def test_recordings_of_its_own_on_cuda(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One a test, of the allocator's history; older blocks that are freed make room."""
    for name, value in environment(["a100-40g"]).items():
        monkeypatch.setenv(name, value)
    source = """
def on_card(n):
    return torch.empty(n * MiB, dtype=torch.uint8, device="cuda")

def test_leaves_something():
    KEPT.append(on_card(64))

@budget(peak="0 B", total="64 MiB", end="0 B")
@pytest.mark.parametrize("n", range(3))
def test_replaces_it(n):
    KEPT.clear()
    KEPT.append(on_card(64))

@budget(peak="2 MiB", Temp="1 MiB", phase="score")
@pytest.mark.parametrize("n", range(3))
def test_over(n):
    with scopes.phase("score"), scopes.layer(2), scopes.component("Temp"):
        on_card(3)

@pytest.mark.memory_plateau(requests=8, slope="1 MiB/100 requests")
def test_leak():
    KEPT.append(on_card(3))
"""
    result = session(pytester, source)
    assert result.parseoutcomes() == {"passed": 4, "over": 4}
    result.stdout.fnmatch_lines(
        [
            "memory on cuda:0, beyond what was there before",
            "Temp in score * 1.0 MiB * 3.0 MiB * +2.0 MiB",
            "  score > layer 2*",
            "*test_it.py:*:on_card",
            "OVER BUDGET allocated on cuda:0 3.0 MiB/request > * test_it.py::test_leak",
        ]
    )


@pytest.mark.slow
def test_the_same_measured_with_and_without_stacks(pytester: pytest.Pytester) -> None:
    with_stacks = measured(pytester, WORKLOAD)
    assert measured(pytester, WORKLOAD, "--memory-stacks=0") == with_stacks
