"""The command line itself."""

import subprocess
import sys

import pytest

from memtrace.cli import main


def test_help_answers_without_loading_anything_heavy() -> None:
    code = (
        "import sys; from memtrace.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "examples:" in done.stdout
    loaded = set(done.stderr.split())
    assert loaded.isdisjoint({"torch", "numpy", "pyarrow", "rich", "streamlit", "transformers"})


@pytest.mark.parametrize("command", ["record", "report", "compare", "view", "classify"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"memtrace {command}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["recrod"], ["report"], ["compare", "one"], ["view"]])
def test_wrong_usage_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "usage: memtrace" in capsys.readouterr().err
