"""A pickle is data to us: nothing in it runs, and a small one can't take much."""

import os
import pickle
import resource
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from memtrace.errors import MemtraceError
from memtrace.interchange.unpickle import read_pickle

PLAIN: dict[str, Any] = {
    "numbers": [0, 1, -1, 255, 256, 65535, 65536, -(1 << 31), 1 << 47, (1 << 64) - 1, 1.5],
    "texts": ["", "ascii", "ümläut", "x" * 300, "y" * 70_000],
    "pair": (0, 1 << 40),
    "nothing": [None, True, False, [], {}, ()],
    "same": [frame := {"line": 1}, frame, [frame] * 300],
    "many": [{"number": number} for number in range(20_000)],
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_read_as_it_is(tmp_path: Path, protocol: int) -> None:
    file = tmp_path / "plain.pickle"
    file.write_bytes(pickle.dumps(PLAIN, protocol=protocol))
    data, size = read_pickle(file)
    assert data == PLAIN
    assert size == file.stat().st_size
    assert data["same"][0] is data["same"][2][7]


@pytest.mark.parametrize("protocol", [3, 4, 5])  # 2 has bytes as a call
def test_bytes_are_plain_too(tmp_path: Path, protocol: int) -> None:
    file = tmp_path / "bytes.pickle"
    file.write_bytes(pickle.dumps([b"short", b"long" * 100], protocol=protocol))
    assert read_pickle(file)[0] == [b"short", b"long" * 100]


class Runs:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_in_it_runs(tmp_path: Path, protocol: int) -> None:
    file, made = tmp_path / "evil.pickle", tmp_path / "made"
    file.write_bytes(pickle.dumps({"segments": [Runs(str(made))]}, protocol=protocol))
    with pytest.raises(MemtraceError, match="is not a snapshot"):
        read_pickle(file)
    assert not made.exists()


STOP = b"."
HOSTILE = {
    "empty": b"",
    "text": b"PK\x03\x04 no pickle",
    "no end": b"\x80\x04]",
    "protocol 0": b"(lp0\nI1\na.",
    "global": b"\x80\x04cos\nsystem\n" + STOP,
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + STOP,
    "instance": b"\x80\x02(ios\nsystem\n" + STOP,
    "extension": b"\x80\x02\x82\x01" + STOP,
    "persistent": b"\x80\x02K\x01Q" + STOP,
    "next buffer": b"\x80\x05\x97" + STOP,
    "byte array of 2^60": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + STOP,
    "text of 2^60": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x" + STOP,
    "text of 2^31": b"\x80\x04X" + struct.pack("<I", 1 << 31) + b"x" + STOP,
    "memo of 2^31": b"\x80\x04Nr\xff\xff\xff\x7f" + STOP,
    "memo of 2^24": b"\x80\x04Nr\xff\xff\xff\x00" + STOP,
    "get what isn't there": b"\x80\x04j\xff\xff\x00\x00" + STOP,
    "number of 255 bytes": b"\x80\x04\x8a\xff" + b"\x7f" * 255 + STOP,
    "number of 2^31 bytes": b"\x80\x04\x8b" + struct.pack("<i", (1 << 31) - 1) + STOP,
    "decimal number": b"\x80\x02L" + b"9" * 100_000 + b"L\n" + STOP,
    "nested tuples": b"\x80\x04}N" + b"\x85" * 1_000_000 + b"Ns" + STOP,
    "nested pairs": b"\x80\x04}N" + b"N\x86" * 1_000_000 + b"Ns" + STOP,
    "list as a key": b"\x80\x04}]Ns" + STOP,
    "frozen set": b"\x80\x04(K\x01\x91" + STOP,
    "pop of nothing": b"\x80\x04s" + STOP,
    "not UTF-8": b"\x80\x04\x8c\x01\xff" + STOP,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_isnt_plain_data_is_refused_at_once(tmp_path: Path, name: str) -> None:
    file = tmp_path / "hostile.pickle"
    file.write_bytes(HOSTILE[name])
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(MemtraceError) as refused:
        read_pickle(file)
    assert "\n" not in str(refused.value)
    assert time.process_time() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = pickle.dumps(PLAIN, protocol=4)
    file = tmp_path / "cut.pickle"
    for length in range(0, len(whole) - 1, len(whole) // 60):
        file.write_bytes(whole[:length])
        with pytest.raises(MemtraceError, match="truncated|damaged|doesn't begin like"):
            read_pickle(file)


def test_what_cant_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(MemtraceError, match="isn't there"):
        read_pickle(tmp_path / "none.pickle")
    with pytest.raises(MemtraceError, match="is not a file"):
        read_pickle(tmp_path)
