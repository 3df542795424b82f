"""Tests on cards that aren't there: ``memory_budget(device=…)``."""

import importlib.util
import json
import platform
import sys
from typing import NoReturn

import pytest

from memtrace.budgets import dry  # inner sessions would import another one
from memtrace.errors import MemtraceError
from memtrace.trace.reader import open_trace
from tests.budgeting import QUIET, run, words, write

pytest_plugins = ["pytester"]

ON_CARD = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="no virtual GPU here"
)
CARD = """
def card(n):
    return torch.empty(n * MiB, dtype=torch.uint8, device="cuda")
"""


def session(pytester: pytest.Pytester, source: str, *args: str) -> pytest.RunResult:
    """Run the tests in ``source`` in a pytest of their own."""
    write(pytester, CARD + source)
    return pytester.runpytest_subprocess(*QUIET, "-rA", "--memory-json=report.json", *args)


@ON_CARD
def test_a_test_runs_on_the_card_and_is_judged_there(pytester: pytest.Pytester) -> None:
    """With fixtures, a conftest and parameters, as anywhere; what doesn't fit says why."""
    pytester.makeini("[pytest]\nmemory_traces = kept\nmarkers = mine")
    pytester.makeconftest(
        """
import pytest

def pytest_addoption(parser):
    parser.addoption("--times", type=int)

@pytest.fixture(scope="session")
def times(request):
    return request.config.getoption("--times")
"""
    )
    source = """
@pytest.fixture(scope="module")
def kept():
    return card(64)

@budget(device="l4-24g", peak="10 GiB", Temp="64 MiB")
@pytest.mark.parametrize("n", [1, 1024])
def test_fits(kept, times, n, tmp_path, capsys):
    assert torch.cuda.get_device_name() == "NVIDIA L4"
    with scopes.request("q"), scopes.phase("prefill"), scopes.component("Temp"):
        print("here")
        held = [card(n) for _ in range(times)]

def test_here():
    assert not torch.cuda.is_available()
"""
    result = session(pytester, source, "--times=30", "-m", "not mine")
    assert words(result) == {
        "test_fits[1]": "PASSED",
        "test_fits[1024]": "OVER",
        "test_here": "PASSED",
    }
    result.stdout.fnmatch_lines(
        [
            "memory on cuda:0 (l4-24g, planned), beyond what was there before",
            "peak * 10.00 GiB * 21.00 GiB * +11.00 GiB",
            "- memory budget: doesn't fit l4-24g: 1.00 GiB asked for in request q > prefill -*",
            "it doesn't fit cuda:0 (l4-24g, planned) of 21.99 GiB: in request q > prefill",
            "1.00 GiB were asked for and * are missing however memory is arranged: *",
            "  Temp * 21.00 GiB",
            "  other * 64.0 MiB",
            "more of it: memtrace report kept/test_it.py-test_fits-1024*.memtrace",
            "OVER BUDGET doesn't fit l4-24g: 1.00 GiB asked for in request q > prefill test_it.py*",
            "*2 passed, 1 over budget*",
        ]
    )
    (trace,) = (pytester.path / "kept").iterdir()  # that of a test that passed isn't kept
    assert open_trace(trace).manifest["planned"]["device"] == "l4-24g"
    tests = json.loads((pytester.path / "report.json").read_text())["tests"]
    measured = {test["nodeid"].partition("::")[2]: test["memory"] for test in tests}
    assert list(measured["test_fits[1]"][0]["devices"]) == ["cuda:0"]
    assert [one["label"] for one in measured["test_fits[1024]"]] == [None, "fits"]


OUTCOMES = """
import os
import warnings

@budget(device="l4-24g")
def test_fails():
    card(1)
    warnings.warn("mind this")
    print("said")
    assert [] == [1]

@budget(device="l4-24g")
@pytest.mark.skipif(torch.cuda.is_available(), reason="it has a card")
def test_skips():
    pass

@budget(device="l4-24g")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a card")
def test_is_not_skipped():
    card(1)

@budget(device="l4-24g")
@pytest.mark.xfail(raises=torch.OutOfMemoryError)
def test_is_not_to_fit():
    card(1 << 20)

@budget(device="l4-24g")
def test_gets_over_it():
    with pytest.raises(torch.OutOfMemoryError):
        card(1 << 20)

@budget(device="l4-24g")
def test_stays_on_the_cpu():
    mib(1)

@budget(device="l4-24g")
def test_dies():
    os._exit(7)

@pytest.fixture
def large():
    return card(1 << 20)

@budget(device="l4-24g")
def test_fixture(large):
    pass

@budget(device="2×l4-24g", allocator="expandable_segments:True", total="2 MiB")
def test_cards():
    card(1)
    torch.empty(1, device="cuda:1")
    assert torch.cuda.memory_snapshot()[0]["is_expandable"]

@budget(device="l4-24g", name="theirs")
def test_theirs():
    card(4)

@budget(device="l4-24g", peak="50 % of theirs")
def test_ours():
    card(4)
"""
EXPECTED = {
    "test_fails": "FAILED",
    "test_is_not_skipped": "PASSED",
    "test_is_not_to_fit": "XFAIL",
    "test_gets_over_it": "PASSED",
    "test_stays_on_the_cpu": "FAILED",
    "test_dies": "ERROR",
    "test_fixture": "OVER",
    "test_cards": "PASSED",
    "test_theirs": "PASSED",
    "test_ours": "OVER",
}


@ON_CARD
@pytest.mark.slow
@pytest.mark.parametrize("args", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_outcomes_are_the_tests_own(pytester: pytest.Pytester, args: list[str]) -> None:
    result = session(pytester, OUTCOMES, *args)
    assert words(result) == EXPECTED
    text = result.stdout.str()
    for line in (
        "assert [] == [1]",
        "-- Captured stdout call --",
        "UserWarning: mind this",
        "SKIPPED [1] test_it.py:*: it has a card",
        "nothing was allocated on l4-24g; is everything on the CPU?",
        "the pytest on l4-24g ended with exit code 7:",
        "OVER BUDGET peak 4.0 MiB > 2.0 MiB (+2.0 MiB)",
    ):
        result.stdout.fnmatch_lines([f"*{line.replace('[', '[[]')}*"])
    assert "INTERNALERROR" not in text


@ON_CARD
@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("pytest_rerunfailures") is None, reason="no pytest-rerunfailures"
)
def test_a_rerun_is_another_run(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.flaky(reruns=2)
@budget(device="l4-24g")
def test_flaky():
    with open("runs", "a+") as runs:
        runs.seek(0)
        before = runs.read()
        runs.write("x")
    card(1)
    assert before
"""
    result = session(pytester, source)
    assert result.parseoutcomes() == {"passed": 1, "rerun": 1}
    assert (pytester.path / "runs").read_text() == "xx"


def no_card(*_: object, **__: object) -> NoReturn:
    raise MemtraceError("the virtual GPU needs Linux on x86-64, and this is Darwin on arm64")


def test_where_no_virtual_gpu_runs_it_is_a_fake_one(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memtrace.dryrun.prepare", no_card)
    source = "@budget(device='l4-24g', peak='8 MiB')\ndef test_it():\n    held = card(1 << 15)\n"
    result = run(pytester, CARD + source)
    result.stdout.fnmatch_lines(["OVER BUDGET doesn't fit l4-24g: 32.00 GiB asked for *"])
    assert result.parseoutcomes() == {"over": 1}


def test_no_card_is_a_failure_with_a_sentence(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a skip: a budget that wasn't looked at isn't kept."""
    monkeypatch.setattr(dry, "dry_run", no_card)
    source = "@budget(device='l4-24g')\ndef test_it():\n    raise SystemExit\n"
    result = run(pytester, source)
    result.stdout.fnmatch_lines(
        ["memory_budget(device='l4-24g'): the virtual GPU needs Linux on x86-64, and this is *"]
    )
    assert result.parseoutcomes() == {"errors": 1}


@pytest.mark.parametrize(
    ("marker", "sentence"),
    [
        ("device='l5'", "'l5' is no known card; known are a100-40g, *"),
        ("device=4090", "memory_budget(device=4090): device is a text"),
        ("peak='1 MiB', allocator='x:1'", "memory_budget(allocator=…) needs device=…, the card *"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(
    pytester: pytest.Pytester, marker: str, sentence: str
) -> None:
    result = run(pytester, f"@budget({marker})\ndef test_it():\n    raise SystemExit\n")
    result.stdout.fnmatch_lines([sentence])
    assert result.parseoutcomes() == {"errors": 1}


def test_a_card_is_of_a_whole_test(pytester: pytest.Pytester) -> None:
    source = """
def test_it(memory_budget):
    with memory_budget(device="l4-24g"):
        pass
"""
    result = run(pytester, source)
    result.stdout.fnmatch_lines(["*memory_budget(device=…) doesn't belong to a with block, only*"])
    pytester.makeini("[pytest]\nmemory_budget = device = l4-24g")
    result = pytester.runpytest_inprocess(*QUIET)
    result.stderr.fnmatch_lines(["*memory_budget(device=…) doesn't belong to the default budget"])
