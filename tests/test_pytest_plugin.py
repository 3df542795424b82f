"""The fixture ``memory_budget``, in pytest sessions of its own."""

import sys

import pytest

pytest_plugins = ["pytester"]

SUITE = """
    from concurrent.futures import ThreadPoolExecutor

    import torch
    from memtrace import scopes

    MODEL = torch.nn.Linear(2048, 2048)              # 16 MiB, older than any block
    OLD = [torch.zeros(8 << 20)]                     # 32 MiB

    def test_within(memory_budget):
        with memory_budget(peak="4 MiB", Temp="0 B", other=4 << 20):   # exactly at the limit
            torch.zeros(1 << 20)

    def test_what_is_older_does_not_count(memory_budget):
        with memory_budget(peak="2 MiB", model="0 B"):
            MODEL(torch.ones(1, 2048))

    def test_what_is_older_counts_when_it_is_freed(memory_budget):
        with memory_budget(peak="1 MiB"):
            OLD.clear()
            OLD.append(torch.zeros(8 << 20))

    def test_meta_tensors_hold_no_memory(memory_budget):
        with memory_budget(peak="1 MiB"):
            torch.empty(1 << 30, device="meta")

    def test_over_the_peak(memory_budget):
        with memory_budget(peak="4 MiB"):
            x = torch.zeros(1 << 20)
            y = x + 1

    def test_over_a_component(memory_budget):
        before = torch.zeros(1 << 20)                # not the block's
        with memory_budget(peak="1 GiB", Temp="1 MiB"):
            with scopes.phase("score"), scopes.component("Temp"):
                torch.softmax(before, 0)

    def test_a_failing_block_fails_as_itself(memory_budget):
        with memory_budget(peak="1 B"):
            torch.zeros(1 << 20)
            raise KeyError("mine")

    def test_two_blocks(memory_budget):
        for _ in range(2):
            with memory_budget(peak="4 MiB"):
                torch.zeros(1 << 20)

    def test_a_wrong_size(memory_budget):
        with memory_budget(peak="4 MiBs"):
            pass

    def test_a_wrong_name(memory_budget):
        with memory_budget(KV="4 MiB"):
            pass

    def test_a_fraction(memory_budget):
        with memory_budget(peak=1.5):
            pass

    def test_no_budget(memory_budget):
        with memory_budget():
            pass

    def test_a_thread_that_ran_before(memory_budget):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(int).result()
            with memory_budget(peak="1 MiB"):
                pool.submit(torch.zeros, 1 << 20).result()
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(SUITE)
    return pytester


def test_budgets_pass_and_fail(suite: pytest.Pytester) -> None:
    result = suite.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=6, failed=7, warnings=1)
    text = result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            "*memory budget exceeded: peak 8.0 MiB > 4.0 MiB",
            "component * at the peak * own peak * budget",
            "peak * 8.0 MiB * 8.0 MiB * 4.0 MiB",
            "*aten.zeros.default",
            "*memory budget exceeded: Temp 4.0 MiB > 1.0 MiB",
            "peak on cpu in score*",
            "*KeyError: 'mine'",
            "*'4 MiBs' is not a size*",
            "*memory_budget doesn't know 'KV'*",
            "*1.5 is not a size*",
            "*memory_budget needs a budget*",
            "*memory_budget can't see what threads allocate that ran before it: ThreadPool*",
        ]
    )
    assert "INTERNALERROR" not in text


def test_budgets_work_inside_a_recorded_pytest(suite: pytest.Pytester) -> None:
    """Under ``memtrace record -- pytest`` the blocks are judged from that recording.

    It sees every thread from its start, so the one that a block alone can't see fails there.
    """
    plain = suite.runpytest_subprocess("-p", "no:cacheprovider")
    recorded = suite.run(
        *(sys.executable, "-m", "memtrace", "record", "-o", "run", "--"),
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
    )
    assert recorded.ret == plain.ret == 1
    assert plain.parseoutcomes() == {"passed": 6, "failed": 7, "warnings": 1}
    assert recorded.parseoutcomes() == {"passed": 5, "failed": 8}
    recorded.stdout.fnmatch_lines(["*memory budget exceeded: peak 8.0 MiB > 4.0 MiB"])
