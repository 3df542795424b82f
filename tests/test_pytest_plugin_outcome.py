"""What a breach looks like: its outcome, the summary, JUnit's XML and the JSON report."""

import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from tests.budgeting import run, words

pytest_plugins = ["pytester"]

BREACH = """
@budget(peak="2 MiB", Temp="1 MiB", Act="1 MiB")
def test_scoring():
    x = mib(1)
    with scopes.request("q7"), scopes.phase("prefill"), scopes.layer(3), scopes.chunk(2):
        with scopes.component("Temp"):
            scores = mib(4)
"""


def test_the_numbers_come_first(pytester: pytest.Pytester) -> None:
    """Metric, measured, limit and excess before the test's name, uncut at any width."""
    pytester.makeini("[pytest]\nmemory_traces = kept")
    name = "test_with_quite_a_long_name_" * 3
    result = run(pytester, BREACH.replace("test_scoring", name))
    result.stdout.fnmatch_lines(
        [
            "test_it.py M *",
            f"*_ {name} _*",
            "memory on cpu, beyond what was there before",
            "budget * limit * measured * excess",
            "peak * 2.0 MiB * 5.0 MiB * +3.0 MiB",
            "  request q7 > prefill > layer 3 > chunk 2 > aten.empty.memory_format",
            "Temp * 1.0 MiB * 4.0 MiB * +3.0 MiB",
            "Act * 1.0 MiB * 0 B * within",
            "at the peak in request q7 > prefill > layer 3 > chunk 2 > aten.empty.memory_format:",
            "component * then * own peak",
            "all * 5.0 MiB * 5.0 MiB",
            "Temp * 4.0 MiB * 4.0 MiB",
            "other * 1.0 MiB * 1.0 MiB",
            "largest allocations then:",
            "* 4.0 MiB  Temp * 1 ×  prefill > layer 3 > aten.empty.memory_format",
            "*test_it.py:*:mib",
            "*test_it.py:*:test_with_quite_a_long_name_*",
            "* 1.0 MiB  other * 1 ×  aten.empty.memory_format",
            "more of it: memtrace report kept/test_it.py-test_with_quite_a_long_name*.memtrace",
            "*short test summary info*",
            "OVER BUDGET peak 5.0 MiB > 2.0 MiB (+3.0 MiB), Temp 4.0 MiB > 1.0 MiB (+3.0 MiB) "
            f"test_it.py::{name}",
            "*= 1 over budget in *",
        ]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_the_saved_trace_opens(pytester: pytest.Pytester) -> None:
    """With the command that is shown; a second run replaces it, and one that passes leaves none."""
    pytester.makeini("[pytest]\nmemory_traces = kept")
    for _ in range(2):
        result = run(pytester, BREACH)
        (line,) = [one for one in result.outlines if one.startswith("more of it: ")]
        command = line.removeprefix("more of it: ").split()
        assert len(list((pytester.path / "kept").iterdir())) == 1
        report = pytester.run(sys.executable, "-m", *command)
        assert report.ret == 0
        report.stdout.fnmatch_lines(["*identities * hold at all * events", "*prefill > layer 3*"])
    run(pytester, "@budget(peak='1 GiB')\ndef test_fine():\n    mib(1)\n", "--memory-traces=none")
    assert list((pytester.path / "none").iterdir()) == []


def test_a_test_that_goes_elsewhere(pytester: pytest.Pytester) -> None:
    """The trace is named as from where pytest was started."""
    source = """
import os

@budget(peak="1 MiB")
def test_it(tmp_path):
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    mib(2)
"""
    result = run(pytester, source, "--memory-traces=kept")
    result.stdout.fnmatch_lines(["more of it: memtrace report kept/test_it.py-test_it-*.memtrace"])


def test_each_outcome_is_counted_as_itself(pytester: pytest.Pytester) -> None:
    """Over budget apart from failed; a test that fails anyway shows its memory, too."""
    source = """
@budget(peak="1 MiB")
def test_over():
    mib(2)

@budget(peak="1 MiB")
def test_over_and_wrong():
    x = mib(2)
    assert x.numel() == 0

@budget(peak="1 MiB", end="0 B")
def test_wrong():
    x = mib(1)
    assert x.numel() == 0

def test_block_over_and_wrong(memory_budget):
    with memory_budget(peak="1 MiB"):
        mib(2)
        raise KeyError("mine")

@budget(peak="1 MiB")
@pytest.mark.xfail(strict=True)
def test_xfail():
    mib(2)

@budget(peak="1 MiB")
@pytest.mark.xfail(strict=True)
def test_xpass():
    mib(1)

@budget(peak="1 MiB")
@pytest.mark.xfail(raises=ZeroDivisionError)
def test_xfail_of_another_kind():
    mib(2)

@budget(peak="1 MiB")
def test_skips():
    pytest.skip("not here")

@budget(peak="1 MiB")
def test_passes():
    mib(1)
"""
    result = run(pytester, source, "-rA")
    assert words(result) == {
        "test_over": "OVER",
        "test_over_and_wrong": "FAILED",
        "test_wrong": "FAILED",
        "test_block_over_and_wrong": "FAILED",
        "test_xfail": "XFAIL",
        "test_xpass": "FAILED",
        "test_xfail_of_another_kind": "OVER",
        "test_passes": "PASSED",
    }
    counts = result.parseoutcomes()
    assert counts == {"failed": 4, "over": 2, "xfailed": 1, "skipped": 1, "passed": 1}
    result.stdout.fnmatch_lines(
        [
            "*_ test_over_and_wrong _*",
            "E * assert 2097152 == 0",
            "*- memory budget: peak 2.0 MiB > 1.0 MiB (+1.0 MiB) -*",
            "*component * then * own peak",
            "*more of it: memtrace report *",
            "*_ test_wrong _*",
            "*_ test_block_over_and_wrong _*",
            "*KeyError: 'mine'",
            "*- memory budget: peak 2.0 MiB > 1.0 MiB (+1.0 MiB) -*",
        ]
    )
    after = result.stdout.str().partition("_ test_wrong _")[2]
    assert "memory budget" not in after.partition("_ test_block_over")[0]


def test_verbose_and_stop_at_the_first(pytester: pytest.Pytester) -> None:
    result = run(pytester, BREACH + "\ndef test_next():\n    pass\n", "-v", "-x")
    result.stdout.fnmatch_lines(
        ["test_it.py::test_scoring OVER BUDGET peak 5.0 MiB > 2.0 MiB (+3.0 MiB)*"]
    )
    assert result.parseoutcomes() == {"over": 1}


def test_junit(pytester: pytest.Pytester) -> None:
    """The numbers in the message, all about them in the text, and each metric a property."""
    run(pytester, BREACH, "--junitxml=junit.xml")
    (case,) = ElementTree.parse(pytester.path / "junit.xml").getroot().iter("testcase")
    (failure,) = case.iter("failure")
    assert failure.get("message") == (
        "peak 5.0 MiB > 2.0 MiB (+3.0 MiB), Temp 4.0 MiB > 1.0 MiB (+3.0 MiB)"
    )
    assert "largest allocations then:" in (failure.text or "")
    properties = [(one.get("name"), one.get("value")) for one in case.iter("property")]
    found = dict(properties)
    assert len(found) == len(properties)
    assert found["memory.cpu.peak"] == str(5 << 20)
    assert found["memory.cpu.Temp"] == str(4 << 20)
    assert found["memory.cpu.end"] == "0"
    assert found["memory.limit.Temp"] == str(1 << 20)
    assert (found["memory.trace"] or "").endswith(".memtrace")


def test_a_file_in_the_place_of_the_folder(pytester: pytest.Pytester) -> None:
    (pytester.path / "file").touch()
    result = run(pytester, BREACH, "--memory-traces=file")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["memory can't be recorded in *file: *"])


def test_json(pytester: pytest.Pytester) -> None:
    """Every budgeted test and block; docs/json.md describes the document."""
    source = (
        BREACH
        + """
def test_blocks(memory_budget):
    with memory_budget(peak="2 MiB"):
        mib(1)
    with memory_budget(name="second"):
        mib(2)

def test_without_budget():
    mib(3)
"""
    )
    run(pytester, source, "--memory-json=out/memory.json")
    document = json.loads((pytester.path / "out" / "memory.json").read_text())
    assert document["schema"] == 1
    scoring, blocks = document["tests"]
    assert (scoring["nodeid"], scoring["outcome"]) == ("test_it.py::test_scoring", "over budget")
    (one,) = scoring["memory"]
    assert one["devices"]["cpu"]["peak"] == 5 << 20
    limit = one["limits"][1]
    assert (limit["metric"], limit["allowed"], limit["measured"]) == ("Temp", 1 << 20, 4 << 20)
    assert (limit["excess"], limit["device"], limit["limit"]) == (3 << 20, "cpu", "1.0 MiB")
    assert "layer 3 > chunk 2" in limit["at"]
    assert one["top"][0]["component"] == "Temp"
    assert one["top"][0]["stack"][0].endswith(":mib")
    assert (pytester.path / one["trace"]).is_dir()
    assert blocks["outcome"] == "passed"
    assert [block["label"] for block in blocks["memory"]] == ["1", "second"]
    assert [block["devices"]["cpu"]["peak"] for block in blocks["memory"]] == [1 << 20, 2 << 20]


def test_a_default_budget_for_the_suite(pytester: pytest.Pytester) -> None:
    """From the configuration, for every test; a marker's own limits win."""
    pytester.makeini(
        """
        [pytest]
        memory_budget =
            peak = 2 MiB
            Temp = 1MiB
            tolerance = 50 %
        """
    )
    source = """
def test_within():
    mib(3)

def test_over():
    mib(4)

@budget(peak="8 MiB")
def test_of_its_own():
    mib(8)

@budget(peak=None)
def test_lifted():
    with scopes.component("Temp"):
        mib(2)
"""
    assert words(run(pytester, source, "-rA")) == {
        "test_within": "PASSED",
        "test_over": "OVER",
        "test_of_its_own": "PASSED",
        "test_lifted": "OVER",
    }


@pytest.mark.slow
def test_every_option_has_its_twin(pytester: pytest.Pytester) -> None:
    """In the configuration; the command line wins."""
    pytester.makeini(
        """
        [pytest]
        memory_json = ini.json
        memory_traces = ini-traces
        memory_stacks = 0
        memory_storage = ini-storage
        memory_save = ini-save
        """
    )
    run(pytester, BREACH)
    one = json.loads((pytester.path / "ini.json").read_text())["tests"][0]["memory"][0]
    assert one["top"][0]["stack"] == []
    assert "ini-traces" in one["trace"]
    assert (pytester.path / "ini-storage" / "ini-save.json").exists()
    run(pytester, BREACH, "--memory-json=cli.json", "--memory-stacks=1")
    one = json.loads((pytester.path / "cli.json").read_text())["tests"][0]["memory"][0]
    assert len(one["top"][0]["stack"]) == 1
    pytester.makeini(
        """
        [pytest]
        memory_storage = ini-storage
        memory_compare = ini-save
        memory_compare_fail =
            peak:10%
            Temp:1MiB
        """
    )
    more = BREACH.replace("mib(4)", "mib(8)").replace('"2 MiB", Temp="1 MiB"', '"1 GiB"')
    result = run(pytester, more)
    result.stdout.fnmatch_lines(["OVER BUDGET peak 9.0 MiB > 5.5 MiB * Temp 8.0 MiB > 5.0 MiB *"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--memory-compare=main"],
            "*main.json doesn't exist; nothing is saved yet (--memory-save*",
        ),
        (["--memory-compare-fail=peak:5%"], "*--memory-compare-fail needs --memory-compare NAME"),
        (["--memory-stacks=many"], "*--memory-stacks many: write a number of frames, 0 for none"),
        (["--memory-save=../up"], "*'../up' is no name to save measurements by; use one like main"),
        (
            ["-o", "memory_budget=peak 2 GiB"],
            "*'peak 2 GiB' is no budget; write lines as peak = 2*",
        ),
        (["-o", "memory_budget=peak = 2 GiBs"], "*peak: '2 GiBs' is not a size;*"),
        (
            ["-o", "memory_budget=name = me"],
            "*memory_budget(name=…) doesn't belong to the default*",
        ),
    ],
)
def test_wrong_options(pytester: pytest.Pytester, arguments: list[str], message: str) -> None:
    """A usage error in one sentence."""
    result = run(pytester, BREACH, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: memtrace: {message}"])
    assert "Traceback" not in result.stderr.str()
