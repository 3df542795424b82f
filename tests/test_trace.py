"""What is written is what is read, after a kill too."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.errors import MemtraceError, TraceError
from memtrace.sizes import format_size, parse_size
from memtrace.trace import reader
from memtrace.trace.manifest import read_manifest, write_manifest
from memtrace.trace.reader import open_trace
from memtrace.trace.schema import TABLES
from memtrace.trace.writer import TableWriter

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = {
    pa.int8(): st.none() | st.integers(-(2**7), 2**7 - 1),
    pa.int32(): st.none() | st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.none() | st.integers(-(2**63), 2**63 - 1),
    pa.string(): st.none() | TEXT,
    pa.list_(pa.string()): st.none() | st.lists(TEXT, max_size=4),
}


@st.composite
def rows(draw, table: str):
    schema = TABLES[table]
    return [
        {field.name: draw(VALUES[field.type]) for field in schema}
        for _ in range(draw(st.integers(1, 12)))
    ]


@settings(max_examples=60)
@given(st.data(), st.sampled_from(sorted(TABLES)))
def test_every_value_comes_back(tmp_path_factory, data, table) -> None:
    folder = tmp_path_factory.mktemp("table")
    batches = data.draw(st.lists(rows(table), min_size=1, max_size=3))
    with TableWriter(folder) as writer:
        for batch in batches:
            writer.append(
                table, {name: [row[name] for row in batch] for name in TABLES[table].names}
            )
    with pa.ipc.open_stream(folder / f"{table}.arrow") as stream:
        assert stream.read_all().to_pylist() == [row for batch in batches for row in batch]


def events(start: int, count: int) -> dict[str, np.ndarray]:
    numbers = np.arange(start, start + count)
    return {
        "time_us": numbers,
        "id": numbers,
        "bytes": numbers * 512,
        "requested": numbers * 500,
        "context": np.zeros(count, dtype=np.int64),
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose recorder was killed: three batches of ten events, no end marker, no checksums."""
    folder = tmp_path / "killed.memtrace" / "7"
    folder.mkdir(parents=True)
    write_manifest(folder.parent, {"state": "running"})
    write_manifest(folder, {"pid": 7})
    writer = TableWriter(folder)
    writer.append("scopes", {"parent": [-1], "kind": ["process"], "name": ["7"]})
    writer.append(
        "contexts",
        {
            "action": [0],
            "device": ["cpu"],
            "pool": [None],
            "stream": [0],
            "component": ["Act"],
            "previous": [None],
            "scope": [0],
            "stack": [-1],
        },
    )
    for start in (0, 10, 20):
        writer.append("events", events(start, 10))
    return folder.parent


def test_an_unfinished_stream_is_read_whole(run: Path) -> None:
    trace = open_trace(run)
    assert not trace.complete
    assert trace.processes[0].events["bytes"].tolist() == [n * 512 for n in range(30)]
    assert trace.torn == {}


def test_a_torn_batch_is_left_out_and_counted(run: Path) -> None:
    path = run / "7" / "events.arrow"
    writer = TableWriter(run / "7")  # the same two batches again, to know where the second ends
    for start in (0, 10):
        writer.append("events", events(start, 10))
    end = path.stat().st_size
    writer.append("events", events(20, 10))
    path.write_bytes(path.read_bytes()[:-5])
    trace = open_trace(run)
    assert len(trace.processes[0].events["id"]) == 20
    assert trace.torn == {str(path): path.stat().st_size - end}


@pytest.mark.parametrize("first", ["scopes", "stacks", "contexts", "events"])
def test_a_table_read_while_rows_are_written_names_none_that_is_missing(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "live.memtrace" / "7"
    folder.mkdir(parents=True)
    write_manifest(folder.parent, {"state": "running"})
    write_manifest(folder, {"pid": 7})
    writer, written = TableWriter(folder), 0

    def write() -> None:
        nonlocal written
        writer.append_rows("stacks", [((f"infer.py:{written}:main",),)])
        writer.append_rows("scopes", [(written - 1, "phase", str(written))])
        context = (0, "cpu", 0, None, "Act", None, written, written)
        writer.append_rows("contexts", [context])
        writer.append_rows("events", [(written, written, 512, 512, written)])
        written += 1

    def read(*words: Any) -> pa.Table:
        write()
        return read_table(*words)

    read_table = reader._read
    monkeypatch.setattr(reader, "_read", read)
    process = open_trace(folder.parent).processes[0]
    getattr(process, first)
    assert len(process.events["id"]) == 1
    assert len(process.contexts["action"]) < written


def test_the_suffix_may_be_left_out(run: Path) -> None:
    assert open_trace(run.with_suffix("")).name == "killed"


def test_a_manifest_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"state": "running"})
    with pytest.raises(TypeError):
        write_manifest(tmp_path, {"state": object()})
    assert read_manifest(tmp_path)["state"] == "running"
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_a_newer_schema_is_refused_in_words(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"schema": 99, "state": "running"})
    with pytest.raises(TraceError, match="has trace schema 99 .* upgrade memtrace"):
        open_trace(tmp_path)


def test_an_older_schema_is_refused_in_words(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"schema": 1, "state": "running"})
    with pytest.raises(TraceError, match="has trace schema 1, .* record it again"):
        open_trace(tmp_path)


@given(st.integers(0, 2**50))
def test_a_size_printed_reads_back_to_within_its_digits(size: int) -> None:
    number, unit = format_size(size).split()
    digits = len(number.partition(".")[2])
    half_a_digit = parse_size(f"1 {unit}") / 10**digits / 2
    assert abs(parse_size(f"{number} {unit}") - size) <= half_a_digit


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("300 MiB", 300 << 20),
        ("1.5GiB", 3 << 29),
        (" 2 GB ", 2 * 10**9),
        ("4096", 4096),
        ("0 B", 0),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "24 MBxyz", "-1 MiB", "1e9", "1,5 GiB", "5 gib", -1, 1.5, True, None]
)
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(MemtraceError, match="is not a size"):
        parse_size(text)
