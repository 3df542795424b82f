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


NESTED = """
    import pytest
    import torch

    @pytest.mark.memory_budget(peak="12 MiB")
    def test_blocks_in_blocks(memory_budget):
        with memory_budget(peak="12 MiB"):
            outer = torch.zeros(1 << 20)
            with memory_budget(peak="8 MiB", end="4 MiB", name="inner"):
                inner = torch.zeros(2 << 20)
                del inner
                inner = torch.zeros(1 << 20)
        with memory_budget(peak="3 MiB"):
            torch.zeros(1 << 20)

    def test_words_of_the_marker(memory_budget):
        with memory_budget(peak="1 MiB", scope="body"):
            pass

    def test_as_often_as_wanted(memory_budget):
        for n in range(30):
            with memory_budget(peak="4 MiB"):
                torch.zeros(1 << 20)
"""


def test_blocks_nest(pytester: pytest.Pytester) -> None:
    """In each other and in a test with a marker; each counts from its own beginning."""
    pytester.makepyfile(NESTED)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.parseoutcomes() == {"passed": 1, "failed": 1, "over": 1}
    result.stdout.fnmatch_lines(
        [
            "*memory_budget(scope=…) doesn't belong to a with block, only to the marker",
            "OVER BUDGET peak 4.0 MiB > 3.0 MiB (+1.0 MiB) *::test_blocks_in_blocks",
        ]
    )


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(SUITE)
    return pytester


def test_budgets_pass_and_fail(suite: pytest.Pytester) -> None:
    result = suite.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.ret == 1
    assert result.parseoutcomes() == {"passed": 6, "failed": 5, "over": 2, "warnings": 1}
    text = result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            "*KeyError: 'mine'",
            "*'4 MiBs' is not a size*",
            "*memory_budget doesn't know 'KV'*",
            "*1.5 is not a size*",
            "*memory_budget needs a budget*",
            "*memory_budget can't see what threads allocate that ran before it: ThreadPool*",
            "OVER BUDGET peak 8.0 MiB > 4.0 MiB (+4.0 MiB) *::test_over_the_peak",
            "OVER BUDGET Temp 4.0 MiB > 1.0 MiB (+3.0 MiB) *::test_over_a_component",
        ]
    )
    assert "INTERNALERROR" not in text


def test_budgets_work_inside_a_recorded_pytest(suite: pytest.Pytester) -> None:
    """Under ``memtrace record -- pytest`` the blocks are judged from that recording.

    It sees every thread from its start, so the one that a block alone can't see fails there.
    """
    recorded = suite.run(
        *(sys.executable, "-m", "memtrace", "record", "-o", "run", "--"),
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
    )
    assert recorded.ret == 1
    assert recorded.parseoutcomes() == {"passed": 5, "failed": 5, "over": 3}
    recorded.stdout.fnmatch_lines(["OVER BUDGET peak 8.0 MiB > 4.0 MiB (+4.0 MiB) *"])
