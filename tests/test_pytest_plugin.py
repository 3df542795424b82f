"""The fixture ``memory_budget``, in pytest sessions of its own."""

import pytest

pytest_plugins = ["pytester"]

SUITE = """
    import torch
    from memtrace import scopes

    def test_within(memory_budget):
        with memory_budget(peak="4 MiB", Temp="0 B", other=4 << 20):   # exactly at the limit
            torch.zeros(1 << 20)

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

    def test_no_budget(memory_budget):
        with memory_budget():
            pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(SUITE)
    return pytester


def test_budgets_pass_and_fail(suite: pytest.Pytester) -> None:
    result = suite.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=6)
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
            "*memory_budget needs a budget*",
        ]
    )
    assert "INTERNALERROR" not in text


def test_budgets_work_inside_a_recorded_pytest(suite: pytest.Pytester) -> None:
    """Under ``memtrace record -- pytest`` the blocks are judged from that recording."""
    import sys

    plain = suite.runpytest_subprocess("-p", "no:cacheprovider")
    recorded = suite.run(
        *(sys.executable, "-m", "memtrace", "record", "-o", "run", "--"),
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
    )
    assert recorded.ret == plain.ret == 1
    assert recorded.parseoutcomes() == plain.parseoutcomes()
    recorded.stdout.fnmatch_lines(["*memory budget exceeded: peak 8.0 MiB > 4.0 MiB"])
