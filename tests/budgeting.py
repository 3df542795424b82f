"""Sessions of pytest with budgets in them, for the tests of the plugin."""

import json
from typing import Any

import pytest
import torch  # noqa: F401  inner sessions forget what they import, and torch can't be imported twice

import memtrace.budgets.reporting
import memtrace.budgets.running  # noqa: F401

#: pytest-asyncio wants to be told.
QUIET = ("-o", "asyncio_default_fixture_loop_scope=function")

PREAMBLE = """
import pytest
import torch
from memtrace import scopes

budget = pytest.mark.memory_budget
MiB = 2**20
KEPT = []

def mib(n):
    return torch.empty(n * MiB, dtype=torch.uint8)
"""


def run(pytester: pytest.Pytester, source: str, *args: str) -> pytest.RunResult:
    """Run the tests in ``source``, below the preamble, in a session inside this process."""
    write(pytester, source)
    return pytester.runpytest_inprocess(*QUIET, *args)


def write(pytester: pytest.Pytester, source: str) -> None:
    """Make ``source``, below the preamble, the test file."""
    pytester.makepyfile(test_it=PREAMBLE + source)


def measured(pytester: pytest.Pytester, source: str, *args: str) -> dict[str, dict[str, Any]]:
    """What each test, or block, took on the CPU: metric → bytes, by name."""
    run(pytester, source, "--memory-json=report.json", *args)
    return read(pytester)


def read(pytester: pytest.Pytester) -> dict[str, dict[str, Any]]:
    """The same out of a session's JSON report."""
    document = json.loads((pytester.path / "report.json").read_text())
    return {
        test["nodeid"].partition("::")[2] + (f" {one['label']}" if one["label"] else ""): one[
            "devices"
        ].get("cpu", {})
        for test in document["tests"]
        for one in test["memory"]
    }


def words(result: pytest.RunResult) -> dict[str, str]:
    """The first word of each test's line in ``-rA``, by the test's name: PASSED, OVER, ERROR, …"""
    lines = result.stdout.str().partition("short test summary info")[2].splitlines()
    return {
        line.partition("test_it.py::")[2].split(" - ")[0].strip(): line.split()[0]
        for line in lines
        if "test_it.py::" in line
    }
