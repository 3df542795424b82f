"""Runs whose recorder was killed have no checksums: any bytes in them are read or refused."""

import io
import json
import re
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memtrace.cli import main
from memtrace.trace.schema import TABLES
from tests.synthetic import PID, prefill


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    history = prefill()
    history.rows["segments"] = [(0, 4096, 2 << 20, 7, "0.1", 0)]
    history.rows["blocks"] = [
        (0, 4096, 512, 500, 1, "Act", -1),
        (0, 4608, (2 << 20) - 512, 0, 0, None, -1),
    ]
    counted = (512, 2 << 20, 512, 500, 0, 512, 2 << 20, 0, 1, 0, 0)
    history.rows["boundaries"] = [(0, "cuda:0", 10, 0, *counted)]
    return history.write(tmp_path_factory.mktemp("killed") / "run", complete=False)


#: What ``report`` doesn't read.
ASKED = ("boundaries", "segments", "blocks")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    table=st.sampled_from([name for name in TABLES if name != "stacks"]),
    cut=st.none() | st.floats(0, 1),
    flips=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), max_size=4),
)
def test_any_bytes_in_a_killed_run_are_read_or_refused(
    table: str, cut: float | None, flips: list[tuple[float, int]], killed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(killed, run)
    path = run / str(PID) / f"{table}.arrow"
    data = bytearray(path.read_bytes())
    for share, mask in flips:
        data[int(share * (len(data) - 1))] ^= mask
    path.write_bytes(data if cut is None else data[: int(cut * len(data))])

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["stability" if table in ASKED else "report", str(run), "--json"])
    if code in (0, 3, 4):
        assert err.getvalue() == ""
        assert json.loads(out.getvalue()).get("complete", False) is False
    else:
        assert re.fullmatch(r"memtrace: [^\n]+\n", err.getvalue())


@settings(max_examples=30)
@given(share=st.floats(0, 1))
def test_a_killed_run_is_read_up_to_its_last_whole_batch(share: float, killed: Path) -> None:
    path = killed / str(PID) / "events.arrow"
    whole = path.read_bytes()
    try:
        kept = int(share * len(whole))
        path.write_bytes(whole[:kept])
        out = io.StringIO()
        with redirect_stdout(out):
            assert main(["report", str(killed), "--json"]) == 0
        found = json.loads(out.getvalue())
        assert found["events"] in (0, 27, 54)
        torn = found["torn"].get(str(path), 0)
        # What is read and what is torn off make up the file.
        again = whole[: kept - torn]
        assert 0 <= torn <= kept
        path.write_bytes(again)
        with redirect_stdout(io.StringIO()) as out:
            assert main(["report", str(killed), "--json"]) == 0
        assert json.loads(out.getvalue())["events"] == found["events"]
    finally:
        path.write_bytes(whole)


def test_a_batch_that_claims_to_unpack_to_more_than_there_is(
    killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(killed, tmp_path / "bomb")
    path = run / str(PID) / "events.arrow"
    data = path.read_bytes()
    # A compressed buffer begins with the size that it unpacks to.
    size = (27 * 8).to_bytes(8, "little")
    assert size in data
    path.write_bytes(data.replace(size, (1 << 60).to_bytes(8, "little")))
    assert main(["report", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["events"], found["torn"][str(path)] > 0) == (0, True)


def test_arrow_itself_checks_what_we_rely_on() -> None:
    """A string column whose bytes are no UTF-8 must not reach us as a string."""
    broken = pa.StringArray.from_buffers(
        1,
        pa.py_buffer((0).to_bytes(4, "little") + (1).to_bytes(4, "little")),
        pa.py_buffer(b"\xff"),
    )
    with pytest.raises(pa.ArrowInvalid):
        broken.validate(full=True)
