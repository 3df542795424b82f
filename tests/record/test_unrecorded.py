"""Why a process can't be recorded."""

import pytest

from memtrace.record.unrecorded import closing_option


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("python infer.py -I", None),
        ("python -I infer.py", "-I"),
        ("python -uI -c pass", "-I"),
        ("python -c -I", None),
        ("python -m module -S", None),
        ("python -W ignore -S x.py", "-S"),
        ("python -Wignore -E x.py", "-E"),
        ("python -X utf8 x.py -E", None),
        ("python -Xdev -sE x.py", "-E"),
        ("python --check-hash-based-pycs default -I x.py", "-I"),
        ("python - -I", None),
        ("python", None),
    ],
)
def test_the_option_that_keeps_a_recorder_out(command: str, option: str | None) -> None:
    assert closing_option(command.split()) == option
