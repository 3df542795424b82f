"""Saving what tests take, and failing when they take more."""

import json

import pytest

from tests.budgeting import run

pytest_plugins = ["pytester"]

SUITE = """
SCALE = 1

@budget(peak="1 GiB")
@pytest.mark.parametrize("n", [2, 4])
def test_it(n):
    with scopes.component("Temp"):
        mib(n * SCALE)

def test_blocks(memory_budget):
    with memory_budget(name="prefill"):
        mib(1)
    with memory_budget(name="decode"):
        mib(3 * SCALE)

@budget(peak="1 MiB")
@pytest.mark.xfail
def test_broken():
    mib(2)

def test_unbudgeted():
    mib(8)
"""
LARGER = SUITE.replace("SCALE = 1", "SCALE = 2")


def test_save(pytester: pytest.Pytester) -> None:
    """A small file that is the same each time, for git: sorted, a number a line, no times."""
    result = run(pytester, SUITE, "--memory-save=main")
    path = pytester.path / ".memory_budgets" / "main.json"
    result.stdout.fnmatch_lines([f"memory: saved as {path}"])
    text = path.read_text()
    assert len(text) < 3000 and text.endswith("}\n")
    document = json.loads(text)
    assert document["schema"] == 1
    assert list(document["tests"]) == [
        "test_it.py::test_blocks decode",
        "test_it.py::test_blocks prefill",
        "test_it.py::test_it[2]",
        "test_it.py::test_it[4]",
    ]
    two = document["tests"]["test_it.py::test_it[2]"]["cpu"]
    assert (two["peak"], two["Temp"], two["end"], two["total"]) == (2 << 20, 2 << 20, 0, 2 << 20)
    run(pytester, SUITE, "--memory-save=main")
    assert path.read_text() == text


def test_compare(pytester: pytest.Pytester) -> None:
    """What changed, and what is new; nothing fails unless it is told to."""
    run(pytester, SUITE.replace("[2, 4]", "[2]"), "--memory-save=main")
    result = run(pytester, LARGER, "--memory-compare=main")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "*= memory compared with main =*",
            "*2.0 MiB → *4.0 MiB *+2.0 MiB (+100.0 %) * peak on cpu in test_it.py::test_it[[]2]",
            "*2.0 MiB → *4.0 MiB *+2.0 MiB (+100.0 %) * Temp on cpu in test_it.py::test_it[[]2]",
            "*3.0 MiB → *6.0 MiB * peak on cpu in test_it.py::test_blocks decode",
            "1 unchanged, 2 changed",
            "new, not compared: test_it.py::test_it[[]4]",
        ]
    )


def test_compare_fail(pytester: pytest.Pytester) -> None:
    """By a share or by bytes, of each test and block that was saved; the rest is no limit."""
    run(pytester, SUITE.replace("[2, 4]", "[2]"), "--memory-save=main")
    arguments = ("--memory-compare=main", "--memory-compare-fail=peak:5%")
    same = run(pytester, SUITE, *arguments, "--memory-compare-fail=Temp:0")
    assert same.ret == 0
    result = run(pytester, LARGER, *arguments, "--memory-compare-fail=Temp:1.5MiB")
    assert result.parseoutcomes() == {"passed": 2, "over": 2, "xfailed": 1}
    result.stdout.fnmatch_lines(
        [
            "peak * 3.1 MiB * 6.0 MiB * +2.9 MiB  (100 % of main, 5 % tolerated)",
            "OVER BUDGET peak 4.0 MiB > 2.1 MiB (+1.9 MiB), Temp 4.0 MiB > 3.5 MiB (+512.0 KiB) "
            "test_it.py::test_it[[]2]",
            "OVER BUDGET peak 6.0 MiB > 3.1 MiB (+2.9 MiB) test_it.py::test_blocks",
        ]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged: it is not JSON"),
        ("[]", "holds no saved measurements"),
        ('{"schema": 99, "tests": {}}', "is of a newer version; upgrade memtrace to read it"),
        ('{"schema": 1, "tests": {"a": {"cpu": {"peak": "much"}}}}', "is damaged: its tests are*"),
    ],
)
def test_damaged_files(pytester: pytest.Pytester, text: str, message: str) -> None:
    """A usage error in one sentence."""
    path = pytester.path / ".memory_budgets" / "main.json"
    path.parent.mkdir()
    path.write_text(text)
    result = run(pytester, SUITE, "--memory-compare=main")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: memtrace: *main.json {message}"])


def test_a_name_that_isn_t_there(pytester: pytest.Pytester) -> None:
    run(pytester, SUITE, "--memory-save=main")
    result = run(pytester, SUITE, "--memory-compare=mian")
    result.stderr.fnmatch_lines(["*mian.json doesn't exist; saved are main (--memory-save NAME)"])


def test_what_can_t_be_written(pytester: pytest.Pytester) -> None:
    """Is said in one sentence, and the session isn't a success."""
    (pytester.path / "file").touch()
    result = run(pytester, SUITE, "--memory-json=file/report.json")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["memory: *file/report.json can't be written: *"])
    assert "INTERNALERROR" not in result.stdout.str()
