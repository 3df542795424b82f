"""The worked example: a project whose CI fails when a workspace grows with the prompt."""

import shutil
from pathlib import Path

import pytest

from tests.budgeting import QUIET

pytest_plugins = ["pytester"]

EXAMPLE = Path(__file__).parents[1] / "examples" / "ci_budget"


@pytest.mark.slow
def test_one_line_makes_it_fail_for_the_right_reason(pytester: pytest.Pytester) -> None:
    """And all else passes still, the test of its values too."""
    shutil.copytree(EXAMPLE, pytester.path, dirs_exist_ok=True)
    whole = pytester.runpytest_subprocess(*QUIET)
    assert whole.parseoutcomes() == {"passed": 5}
    scoring = pytester.path / "scoring.py"
    scoring.write_text(scoring.read_text().replace("BLOCK = 512", "BLOCK = 1 << 20"))
    broken = pytester.runpytest_subprocess(*QUIET)
    assert broken.ret == pytest.ExitCode.TESTS_FAILED
    assert broken.parseoutcomes() == {"passed": 3, "over": 2}
    broken.stdout.fnmatch_lines(
        [
            "*_ test_workspace[[]16384] _*",
            "Temp in score * 2.0 MiB * 16.5 MiB * +14.5 MiB",
            "largest allocations then:",
            "* 8.0 MiB  Temp * score > aten.bmm.default",
            "*scoring.py:*:scores",
            "more of it: memtrace report memory-traces/*.memtrace",
            "OVER BUDGET Temp in score * test_scoring.py::test_workspace[[]4096]",
            "OVER BUDGET Temp in score 16.5 MiB > 2.0 MiB (+14.5 MiB) "
            "test_scoring.py::test_workspace[[]16384]",
        ]
    )
    (line,) = [line for line in (EXAMPLE / "README.md").read_text().splitlines() if "OVER" in line]
    assert line.strip() in broken.outlines
