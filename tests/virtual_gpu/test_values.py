"""Known values on a virtual GPU. The tests themselves run in processes that have one."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from memtrace.virtual_gpu.launch import environment
from tests.record.launching import Launch

_INSIDE = Path(__file__).parent / "values"
_SLOW = {"smollm2"}


def _tests() -> list[Any]:
    found = []
    for path in sorted(_INSIDE.glob("*.py")):
        marks = [pytest.mark.slow] if path.stem in _SLOW else []
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                test = path.stem, node.name
                found.append(pytest.param(*test, id="-".join(test), marks=marks))
    return found


@pytest.fixture(scope="module")
def outcomes(cache, tmp_path_factory):
    """``outcomes(slow)``: what became of each test, by file and name; two processes run them."""
    known: dict[bool, dict[tuple[str, str], list[str]]] = {}

    def run(slow: bool) -> dict[tuple[str, str], list[str]]:
        if slow not in known:
            report = tmp_path_factory.mktemp("inside") / "report.xml"
            files = [str(f) for f in _INSIDE.glob("*.py") if (f.stem in _SLOW) == slow]
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", *files, f"--junitxml={report}"],
                env={**os.environ, **environment(["2×a100-40g"])},
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert report.is_file(), done.stdout + done.stderr
            known[slow] = _read(report)
        return known[slow]

    return run


def _read(report: Path) -> dict[tuple[str, str], list[str]]:
    """What went wrong in each test, over all of its parameters."""
    found: dict[tuple[str, str], list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["name"]
        problems = [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]
        test = case.attrib["classname"].rpartition(".")[2], name.partition("[")[0]
        found.setdefault(test, []).extend(f"{name}: {problem.text}" for problem in problems)
    return found


@pytest.mark.parametrize(("file", "name"), _tests())
def test_within_a_virtual_process(outcomes, file, name):
    found = outcomes(file in _SLOW)
    assert (file, name) in found, f"{name} did not run"
    assert not found[file, name], "\n".join(found[file, name])


_RECORDED = """
import threading, torch

def work():
    with torch.inference_mode():
        assert torch.arange(4, device="cuda")[1:].sum().item() == 6

work()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_a_recorded_program_is_followed_below_the_recorder(cache, tmp_path):
    options = ["--virtual-gpu", "a100-40g"]
    launch = Launch(tmp_path, sys.executable, "-c", _RECORDED, options=options)
    done = launch.run()
    assert done.returncode == 0, done.stderr
    (process,) = launch.trace().processes
    devices = {process.contexts["device"][context] for context in process.events["context"]}
    assert devices == {"cuda:0"}, "what happens on the host to follow values was recorded"
